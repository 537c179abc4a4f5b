#!/usr/bin/env bash
# Guess: stop=0.5 of a guider, as start=0.5, is a setting of the pipeline: every call is guided in the first half of its steps.
# What happens: the first call is; the second raises "'NoneType' object has no attribute 'shape'" in its first steps; the
# third is right again. A guider remembers its last step. When a call begins, the blocks that prepare the text ask it how
# many conditions it has, and after a call that ended unguided it says one: the negative prompt is not encoded, but the first
# step wants it. The error leaves the guider in a guided step, so the next call works. start does no harm: it ends guided.
# Versions: diffusers 0.42.1 (FLUX.3, ClassifierFreeGuidance). Source: num_conditions looks at _step, which only set_state
# in the denoising loop sets.
# Hurt: whoever limits guidance to an interval, measures it on one image and then draws more; a new() guider per call helps.
# Seen 2026-11-29, (forwards, error) of three calls of 4 steps: always (8, none) three times; late (6, none) three times;
#   early (6, none), (2, 'NoneType' object has no attribute 'shape'), (6, none)
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > "$tmp/guider.py" <<'PY'
import diffusers, torch
from diffusers import AutoencoderKLFlux2, Flux3AutoBlocks, Flux3Transformer2DModel
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

class Processor:  # what FLUX.3 uses of its AutoProcessor
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "user fox": 2}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")

    def apply_chat_template(self, messages, **options):
        return "user " + messages[0]["content"]

text = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=16,
            vocab_size=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]})
vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=16, deepstack_visual_indexes=[0])
torch.manual_seed(0)
blocks = Flux3AutoBlocks()
blocks.sub_blocks.pop("prompt_upsampler")  # a language model that rewrites the prompt
pipe = blocks.init_pipeline()
pipe.update_components(
    text_encoder=Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision)).eval(), tokenizer=Processor(),
    vae=AutoencoderKLFlux2(block_out_channels=(4,) * 4, layers_per_block=1, norm_num_groups=2, latent_channels=4,
                           mid_block_add_attention=False, down_block_types=("DownEncoderBlock2D",) * 4,
                           up_block_types=("UpDecoderBlock2D",) * 4),
    transformer=Flux3Transformer2DModel(in_channels=16, cond_in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
                                        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 4, 4)))
pipe.set_progress_bar_config(disable=True)
passes = []
pipe.transformer.register_forward_pre_hook(lambda *_: passes.append(1))

def calls(**options):
    pipe.update_components(guider=pipe.guider.new(**options))
    seen = []
    for _ in range(3):
        passes.clear()
        error = ""
        try:
            pipe(prompt="fox", height=32, width=32, num_inference_steps=4, text_encoder_out_layers=(1, 2), output="images")
        except AttributeError as raised:
            error = str(raised)
        seen.append((len(passes), error))
    return seen

seen = {name: calls(start=a, stop=b) for name, (a, b) in {"always": (0.0, 1.0), "late": (0.5, 1.0), "early": (0.0, 0.5)}.items()}
print("diffusers", diffusers.__version__, "(forwards, error) of three calls:", seen)
assert seen["always"] == [(8, "")] * 3 and seen["late"] == [(6, "")] * 3
assert seen["early"] == [(6, ""), (2, "'NoneType' object has no attribute 'shape'"), (6, "")]
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/guider.py"

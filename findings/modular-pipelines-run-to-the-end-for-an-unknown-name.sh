#!/usr/bin/env bash
# Guess: a pipeline that is asked for an output that it does not have, or called with a keyword that it does not take, raises
# before it computes, as calls of other pipelines do. What happens: output="image" (FLUX.3 has "images") runs text encoder,
# all steps and VAE, and returns None. guidance_scale=1.0, which other pipelines take, is dropped with a warning: the
# image is that of the default scale, from two forwards per step; the scale is in the guider.
# Versions: diffusers 0.42.1 (Flux3ModularPipeline). Source: PipelineState.get returns None by default; __call__ warns
# "Unexpected input … will be ignored".
# Hurt: whoever moves a script to FLUX.3: results "at guidance 1" are those at 3.5, and a night of images is None.
# Seen 2026-11-29, (result, forwards in 4 steps): images (the same image, 8), image (None, 8), guidance_scale=1.0 (the same
#   image, 8), guider of 1.0 (another image, 4)
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > "$tmp/names.py" <<'PY'
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
size = dict(prompt="fox", height=32, width=32, num_inference_steps=4, text_encoder_out_layers=(1, 2), output_type="pt")

def call(**options):
    passes.clear()
    return pipe(generator=torch.Generator().manual_seed(0), **size, **options), len(passes)

seen = {"images": call(output="images"), "image": call(output="image"), "guidance_scale=1.0": call(output="images", guidance_scale=1.0)}
pipe.update_components(guider=pipe.guider.new(guidance_scale=1.0))
seen["guider of 1.0"] = call(output="images")
image = seen["images"][0]
kinds = {None: None, True: "the same image", False: "another image"}
seen = {name: (kinds[got if got is None else torch.equal(got, image)], count) for name, (got, count) in seen.items()}
print("diffusers", diffusers.__version__, "(result, forwards in 4 steps):", seen)
assert seen["images"] == seen["guidance_scale=1.0"] == ("the same image", 8)
assert seen["image"] == (None, 8) and seen["guider of 1.0"] == ("another image", 4)
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/names.py"

#!/usr/bin/env bash
# Guess: a modular pipeline returns its state so that another call can go on from it with pipe(state=state, …): what was
# encoded is kept, and another generator draws another image.
# What happens: the state also holds the last latents and timesteps, and blocks take these for inputs. The second image
# begins at the first one's clean latents instead of noise, whatever the seed, and on a schedule that was shifted twice.
# The only warning is about sigmas that are missing.
# Versions: diffusers 0.42.1 (Flux3ModularPipeline). Source: inputs and intermediates share one dictionary, PipelineState.values.
# Hurt: whoever draws several seeds of one prompt without encoding it again; latents=None, timesteps=None in the call helps.
# Seen 2026-11-29: seeds differ, fresh True, sigmas [1.0, 0.954, 0.874, 0.698, 0.0]; given the state, seeds differ False,
#   sigmas [1.0, 0.993, 0.98, 0.941, 0.0]; with latents=None, timesteps=None as fresh True
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > "$tmp/state.py" <<'PY'
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
size = dict(prompt="fox", height=32, width=32, num_inference_steps=4, text_encoder_out_layers=(1, 2), output_type="pt")

def draw(seed, **options):
    image = pipe(generator=torch.Generator().manual_seed(seed), output="images", **size, **options)
    return image, [round(s, 3) for s in pipe.scheduler.sigmas.tolist()]

state = pipe(generator=torch.Generator().manual_seed(0), **size)
fresh = [draw(seed) for seed in (1, 2)]
again = [draw(seed, state=state) for seed in (1, 2)]
reset = [draw(seed, state=state, latents=None, timesteps=None) for seed in (1, 2)]
seen = {
    "seeds differ, fresh": not torch.equal(fresh[0][0], fresh[1][0]), "sigmas, fresh": fresh[0][1],
    "seeds differ, state": not torch.equal(again[0][0], again[1][0]), "sigmas, state": again[0][1],
    "with latents=None, timesteps=None as fresh": all(torch.equal(a, b) for (a, _), (b, _) in zip(reset, fresh)),
}
print("diffusers", diffusers.__version__, seen)
assert seen["seeds differ, fresh"] and not seen["seeds differ, state"]
assert seen["sigmas, fresh"] == [1.0, 0.954, 0.874, 0.698, 0.0] and seen["sigmas, state"] == [1.0, 0.993, 0.98, 0.941, 0.0]
assert seen["with latents=None, timesteps=None as fresh"]
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/state.py"

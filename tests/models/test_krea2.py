"""Krea-2 where it is unlike other families, against stock Krea2Pipeline.

Why these cases: each is what one would guess from the other families, and each guess trains or samples another model:
scale 1 for off, a distilled model without guidance, padded texts, layers of the language model by default, 6400 tokens
by default, norms cast with the rest, LoRA in the text's blocks, names of LoRA tensors that load nothing.
"""

import json
import subprocess
import sys
from dataclasses import replace

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from world import (  # fmt: skip
    BRIGHTNESS,
    SIZES,
    TWO_PROMPTS,
    case_of,
    differs,
    draw,
    folder,
    initial_noise,
    load,
    policy,
    stock_image,
)

from prefgrpo.commands.cli import main
from prefgrpo.config.recipe import to_yaml

pytestmark = [pytest.mark.families, pytest.mark.full]
CASE = case_of("krea2")


def calls_of(pipe, steps, **call):
    """How many forwards a stock run of `steps` steps makes."""
    seen = []
    hook = pipe.transformer.register_forward_hook(lambda *_: seen.append(1))
    one = replace(CASE, call=CASE.call | call)
    stock_image(pipe, one, initial_noise(load(CASE), CASE.sampling(), 1), SIZES[0], steps, TWO_PROMPTS[:1])
    hook.remove()
    return len(seen)


def test_only_a_scale_of_zero_switches_guidance_off():
    """At 1.0, off elsewhere, it is the usual scale 2."""
    pipe = CASE.pipe(folder("krea2"))
    assert [calls_of(pipe, 3, guidance_scale=scale) for scale in (0.0, 1.0, 4.5)] == [3, 6, 6]
    adapter = load(CASE)
    sampling = [replace(CASE.sampling(), guidance=scale) for scale in (0.0, 1.0, 4.5)]
    assert [adapter.guided(one) for one in sampling] == [False, True, True]
    one = replace(CASE, guidance=1.0, call=CASE.call | {"guidance_scale": 1.0})
    assert differs(adapter, pipe, one) <= 1e-5


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    place = tmp_path_factory.mktemp("distilled")
    pipe = CASE.pipe(folder("krea2"))
    pipe.register_to_config(is_distilled=True)
    pipe.save_pretrained(place)
    return place


@pytest.mark.parametrize("scale", [0.0, 4.5])
def test_a_distilled_model_is_guided_and_shifted_by_a_constant(distilled, scale):
    pipe = CASE.pipe(distilled)
    assert calls_of(pipe, 3, guidance_scale=scale) == (6 if scale else 3)
    one = replace(CASE, guidance=scale, call=CASE.call | {"guidance_scale": scale})
    adapter = load(CASE, distilled)
    assert differs(adapter, pipe, one, SIZES[1], 4) <= 1e-5
    assert not torch.equal(adapter.sigmas(CASE.sampling()), load(CASE).sigmas(CASE.sampling()))
    assert torch.equal(adapter.sigmas(CASE.sampling(SIZES[1])), adapter.sigmas(CASE.sampling()))


def test_a_text_is_as_long_as_its_prompt_in_any_window():
    """The stock pipeline pads before the end of the template, and masks what it has padded."""
    adapter = load(CASE)
    short = adapter.encode(TWO_PROMPTS[0], 256)
    long = adapter.encode(TWO_PROMPTS[0], 400)
    assert short.prompt_embeds.shape == long.prompt_embeds.shape and short.prompt_embeds.shape[1:] == (2, 16)
    torch.testing.assert_close(short.prompt_embeds, long.prompt_embeds, rtol=1e-5, atol=1e-5)
    _, mask = adapter.pipe.encode_prompt([TWO_PROMPTS[0]], max_sequence_length=400)
    seen = mask[0].tolist()
    assert seen[-1] and not all(seen) and seen.index(False) < len(seen) - 5 and sum(seen) == len(short.prompt_embeds)


def test_the_layers_of_the_text_are_those_of_the_folder(tmp_path):
    """`text_encoder_select_layers` is a list in model_index.json like a component, with a text encoder's name."""
    stock = CASE.pipe(folder("krea2"))
    pipe = type(stock)(**stock.components, text_encoder_select_layers=(0, 2))
    pipe.save_pretrained(tmp_path)
    whole = load(CASE, tmp_path)
    for adapter in (whole, load(CASE, tmp_path, encoders=False), type(whole).outline(tmp_path)):
        assert list(adapter.pipe.text_encoder_select_layers) == [0, 2]
    other = load(CASE).encode(TWO_PROMPTS[0], 128).prompt_embeds
    own = whole.encode(TWO_PROMPTS[0], 128).prompt_embeds
    assert not torch.equal(own[:, 0], other[:, 0]) and torch.equal(own[:, 1], other[:, 1])
    bare = load(CASE, tmp_path, encoders=False)
    bare.enable_full()
    bare.save_full(str(tmp_path / "full"))
    index = json.loads((tmp_path / "full" / "model_index.json").read_text())
    assert index["text_encoder_select_layers"] == [0, 2] and index["text_encoder"] == ["transformers", "Qwen3VLModel"]


def test_the_shift_has_the_schedulers_own_length_not_6400(tmp_path):
    """The stock call's own 6400 is never used: the scheduler's default, 4096, is always in its config."""
    assert diffusers.FlowMatchEulerDiscreteScheduler().config.get("max_image_seq_len", 6400) == 4096
    path = folder("krea2", max_image_seq_len=4096)
    assert differs(load(CASE, path), CASE.pipe(path), CASE, SIZES[1], 4) <= 1e-5
    assert not torch.equal(load(CASE, path).sigmas(CASE.sampling()), load(CASE).sigmas(CASE.sampling()))


def test_norms_stay_in_fp32_in_a_bf16_model():
    """1 + w with w in bf16 would have steps of 1/128."""
    adapter = load(CASE, dtype=torch.bfloat16)
    norms = {p.dtype for name, p in adapter.transformer.named_parameters() if "norm" in name}
    assert norms == {torch.float32} and adapter.transformer.img_in.weight.dtype == torch.bfloat16
    assert torch.tensor(1.003, dtype=torch.bfloat16) == 1.0


def test_lora_is_not_in_the_blocks_of_the_text_unless_it_is_asked_for():
    own = load(CASE, encoders=False)
    own.add_lora(4, 8.0)
    names = {name.partition(".")[0] for name, _ in own.trainable()}
    assert names == {"transformer_blocks"}
    assert len(own.trainable()) == 2 * 8 * len(own.transformer.transformer_blocks)
    asked = load(CASE, encoders=False)
    asked.add_lora(4, 8.0, ("attn.to_q",))
    assert {name.partition(".")[0] for name, _ in asked.trainable()} == {"transformer_blocks", "text_fusion"}


@pytest.mark.parametrize("kind, stock", [("bare", None), ("peft", ValueError)])
def test_names_of_a_lora_that_stock_does_not_read_are_read_here(kind, stock, tmp_path):
    """diffusers' names without prefix load nothing there, with a line in the log; peft's raise."""
    policy(CASE, encoders=False).save_lora(str(tmp_path))
    prefix = {"bare": "", "peft": "base_model.model."}[kind]
    tensors = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    save_file({prefix + k.removeprefix("transformer."): t for k, t in tensors.items()}, tmp_path / "other.safetensors")
    pipe = CASE.pipe(folder("krea2"))
    if stock is None:
        pipe.load_lora_weights(str(tmp_path), weight_name="other.safetensors")
        assert not [name for name, _ in pipe.transformer.named_parameters() if "lora_" in name]
    else:
        with pytest.raises(stock):
            pipe.load_lora_weights(str(tmp_path), weight_name="other.safetensors")
    adapter = load(CASE, encoders=False)
    adapter.load_lora(str(tmp_path / "other.safetensors"))
    adapter.save_lora(str(tmp_path / "again"))
    again = load_file(tmp_path / "again" / "pytorch_lora_weights.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[key], tensors[key]) for key in tensors)


STRANGER = """
import sys, diffusers, numpy
from PIL import Image
from safetensors.torch import load_file
model, lora, latents, out, prompt = sys.argv[1:]
pipe = diffusers.Krea2Pipeline.from_pretrained(model)
pipe.load_lora_weights(lora)
call = dict(height=32, width=32, num_inference_steps=3, guidance_scale=4.5, max_sequence_length=256)
pipe(prompt, latents=load_file(latents)["x"], **call).images[0].save(out)
assert not any(name.split(".")[0] == "prefgrpo" for name in sys.modules)
"""


def test_a_stranger_draws_the_images_of_a_run(tmp_path):
    """A run trains and writes its LoRA; `prefgrpo generate` and a script with stock diffusers alone draw a prompt, in
    fp32, to the same bits of the picture."""
    model = folder("krea2")
    (tmp_path / "p.txt").write_text("\n".join([*TWO_PROMPTS, "a green cone", "one tree"]) + "\n")
    values = {
        "model": str(model), "family": "krea2", "name": "run", "output": str(tmp_path), "dtype": "fp32",
        "data": {"prompts": str(tmp_path / "p.txt"), "max_length": 256},
        "rollout": {"height": 32, "width": 32, "steps": 3, "guidance": 4.5, "prompts_per_step": 2, "group_size": 2,
                    "batch_size": 2, "window_low": 0, "window_high": 1, "window_size": 1},
        "train": {"steps": 2, "lora_rank": 4, "lr": 0.05}, "rewards": [{"name": BRIGHTNESS}],
        "eval": {"every": 0}, "checkpoint": {"every": 2},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(to_yaml(values))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    rows = [json.loads(line) for line in next((tmp_path / "run").glob("*.jsonl")).read_text().splitlines()]
    assert {row["policy/on_policy_error"] for row in rows if "policy/on_policy_error" in row} == {0.0}
    adapter = load(CASE)
    adapter.load_lora(str(tmp_path / "run" / "lora"))
    assert max(float(p.detach().abs().max()) for name, p in adapter.trainable() if "lora_B" in name) > 0
    own = draw(adapter, CASE, SIZES[0], 3, TWO_PROMPTS[:1])
    save_file({"x": initial_noise(adapter, CASE.sampling(steps=3), 1)}, tmp_path / "x.safetensors")
    argv = [model, tmp_path / "run" / "lora", tmp_path / "x.safetensors", tmp_path / "out.png", TWO_PROMPTS[0]]
    subprocess.run([sys.executable, "-c", STRANGER, *map(str, argv)], check=True, cwd=tmp_path, timeout=600)
    drawn = torch.tensor(list(Image.open(tmp_path / "out.png").tobytes())).view(32, 32, 3)
    assert torch.equal(drawn, (own[0] * 255).round().permute(1, 2, 0).long())
    before = draw(load(CASE), CASE, SIZES[0], 3, TWO_PROMPTS[:1])
    assert not torch.equal((before * 255).round(), (own * 255).round()), "the run has changed the picture"

"""Krea-2 where it is unlike other families, against stock Krea2Pipeline.

Why these cases: each is what one would guess from the other families, and each guess trains or samples another model:
scale 1 for off, a distilled model without guidance, padded texts, layers of the language model by default, 6400 tokens
by default, LoRA in the text's blocks.
"""

import json
from dataclasses import replace

import diffusers
import pytest
import torch
from world import (  # fmt: skip
    SIZES,
    TWO_PROMPTS,
    case_of,
    differs,
    folder,
    initial_noise,
    load,
    stock_image,
)

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


def test_lora_is_not_in_the_blocks_of_the_text_unless_it_is_asked_for():
    own = load(CASE, encoders=False)
    own.add_lora(4, 8.0)
    names = {name.partition(".")[0] for name, _ in own.trainable()}
    assert names == {"transformer_blocks"}
    assert len(own.trainable()) == 2 * 8 * len(own.transformer.transformer_blocks)
    asked = load(CASE, encoders=False)
    asked.add_lora(4, 8.0, ("attn.to_q",))
    assert {name.partition(".")[0] for name, _ in asked.trainable()} == {"transformer_blocks", "text_fusion"}

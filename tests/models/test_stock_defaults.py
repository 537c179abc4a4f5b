"""docs/evaluation.md's table of what stock pipelines do by default, against their signatures; LTX-2's evaluation, which
samples as published, against the stock call's clips.

Why these cases: a number that is measured with our sampler holds for the stock call only if both do the same, and
diffusers changes its defaults from version to version.
"""

import inspect
import re
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from world import (
    ALONE,
    CPU,
    SEED,
    SIZES,
    TWO_PROMPTS,
    cache,
    case_of,
    embed,
    folder,
    initial_noise,
    load,
    stock_image,
    two_samples,
)

from prefgrpo.config.loading import from_dict
from prefgrpo.data.prompts import Prompt
from prefgrpo.models import MODELS, family, ltx2
from prefgrpo.models.condition import collate
from prefgrpo.rollout.render import render, to_uint8
from prefgrpo.rollout.rollout import rollout
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.run.notes import sampler_notes

ARGUMENT = re.compile(r"guidance|cfg|stg|modality|rescale|truncation|cross_timestep|noise_scale|_steps$|kv_cache")
"""Names of the arguments of a stock call that choose a sampler."""


def table(root):
    """{family: (arguments of the stock call, whole row)} of the page."""
    text = (root / "docs" / "evaluation.md").read_text(encoding="utf-8")
    block = text.partition("<!-- stock defaults -->")[2].partition("<!-- /stock defaults -->")[0]
    rows = [line.split("|")[1:-1] for line in block.strip().split("\n")[2:]]
    named = [(re.findall(r"`(\w+)`", names), dict(re.findall(r"`(\w+)=([^`]+)`", stock))) for names, stock, _ in rows]
    return {name: arguments for names, arguments in named for name in names}


def test_the_table_has_the_stock_defaults_of_every_family(root):
    found = table(root)
    assert found.keys() == MODELS.keys()
    for name, arguments in found.items():
        call = inspect.signature(getattr(diffusers, family(name).pipeline).__call__).parameters
        defaults = {key: p.default for key, p in call.items() if ARGUMENT.search(key)}
        numbers = {key: value for key, value in defaults.items() if isinstance(value, int | float)}
        assert arguments == {key: str(value) for key, value in numbers.items()}, name


def test_only_ltx2_says_that_it_has_two_samplers():
    def said(name, guidance):
        run = {"model": "m", "family": name, "data": {"prompts": "p"}, "rollout": {"guidance": guidance}}
        return sampler_notes(from_dict(run))

    assert [name for name in MODELS if said(name, 3.0)] == ["ltx2"] == [name for name in MODELS if said(name, 1.0)]
    assert said("ltx2", 3.0) == [
        "sampler: rollouts have plain guidance, evaluation and `generate` also the stock call's spatio-temporal and "
        "modality guidance and rescaling: docs/evaluation.md"
    ]
    assert said("ltx2", 1.0) == [
        "sampler: guidance is off, and with it, in evaluation and `generate` too, the stock call's spatio-temporal and "
        "modality guidance and rescaling: docs/evaluation.md"
    ]


def test_ltx2s_published_sampler_has_the_stock_defaults():
    call = inspect.signature(diffusers.LTX2Pipeline.__call__).parameters
    ours = {"stg_scale": ltx2.STG, "modality_scale": ltx2.MODALITY, "guidance_rescale": ltx2.RESCALE}
    both = ours | {f"audio_{name}": value for name, value in ours.items()}
    both |= {"audio_guidance_scale": ltx2.AUDIO_GUIDANCE, "spatio_temporal_guidance_blocks": ltx2.PERTURBED}
    assert both == {name: call[name].default for name in both}


@pytest.mark.full
def test_evaluation_of_ltx2_is_the_stock_call_with_its_defaults(monkeypatch):
    """Four branches, bit by bit in fp32. Block 1, as the tiny model has no block 28; rollouts have another sampler."""
    monkeypatch.setattr(ltx2, "PERTURBED", [1])
    case = case_of("ltx2")
    call = {"num_frames": 5, "max_sequence_length": 32, "spatio_temporal_guidance_blocks": [1]}
    adapter = load(case)
    sampling = case.sampling(steps=2)
    pipe = case.pipe(folder("ltx2"))
    pipe.audio_vae.latents_std.fill_(1.0)  # audio latents that are given are normalised, which rounds
    pipe.audio_vae.latents_mean.zero_()
    rows = []
    pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    start = initial_noise(adapter, sampling)
    want = stock_image(pipe, replace(case, call=call), start, SIZES[0], 2)
    assert rows == [4, 2, 2] * 2, "with and without the prompt, without a block's attention, without that to the audio"
    stock_image(pipe, replace(case, call=call | {"guidance_scale": 1.0}), start, SIZES[0], 2)
    assert rows[6:] == rows[:6], "the audio's scale is still 7"

    embeddings = cache(case)
    sizes = {"height": 32, "width": 32, "steps": 2, "frames": 5}
    run = {"model": str(folder("ltx2")), "family": "ltx2", "seed": SEED, "data": {"prompts": "p"}}
    config = from_dict(run | {"rollout": sizes})
    schedules = Schedules(config, adapter, CPU)
    condition = collate(embed(embeddings, adapter, TWO_PROMPTS, sampling))
    ids = torch.arange(2)
    ours, other = (
        rollout(adapter, schedules.ode(sampling), condition, ids, sampling, seed=SEED, published=published).latents
        for published in (True, False)
    )
    assert torch.equal(adapter.decode(ours, sampling), want)
    assert (adapter.decode(other, sampling) - want).abs().max() > 0.01
    wanted = [(Prompt(k, text), k) for k, text in enumerate(TWO_PROMPTS)]
    made = dict(render(adapter, schedules, embeddings, wanted, sampling, ALONE, wanted[0]))
    assert np.array_equal([made[0], made[1]], to_uint8(want))


def test_a_distilled_ltx2_has_one_branch():
    """With guidance off there is no negative prompt, in evaluation either."""
    case = case_of("ltx2").unguided()
    adapter = load(case)
    args = two_samples(adapter, case)
    assert torch.equal(adapter.published_velocity(*args), adapter.velocity(*args))

"""docs/evaluation.md's table of what stock pipelines do by default, against their signatures and, for LTX-2, a run.

Why these cases: a number that is measured with our sampler holds for the stock call only if both do the same, and
diffusers changes its defaults from version to version.
"""

import inspect
import re

import diffusers
import pytest
import torch
from families import PROMPTS, case_of, folder

from prefgrpo.models import MODELS, family
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


def test_only_ltx2_says_that_the_stock_call_samples_otherwise():
    said = {name: sampler_notes(family(name)) for name in MODELS}
    assert [name for name, lines in said.items() if lines] == ["ltx2"]
    assert "modality guidance" in said["ltx2"][0]


@pytest.mark.full
@pytest.mark.parametrize("scale", [3.0, 1.0])
def test_ltx2_runs_four_branches_by_default_and_a_scale_of_1_turns_off_one(scale):
    """Samples per forward in a step: with and without the prompt, then without a block's attention, then without
    attention between clip and audio."""
    pipe = case_of("ltx2").pipe(folder("ltx2"))
    rows = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    size = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 32}
    one = {"spatio_temporal_guidance_blocks": [1], "output_type": "latent", "generator": torch.Generator()}
    pipe(PROMPTS[0], guidance_scale=scale, **size, **one)
    hook.remove()
    assert rows == [2, 1, 1] * 2, "the audio's scale is still 7"

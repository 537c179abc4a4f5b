"""Attention backends: a run refuses faulty ones; faults are injected.

Why these cases: a backend that drops or wrongly scales a gradient trains without any error. So each kind of fault is
injected into a backend, and the start of a run must detect it; a correct backend must give the
same results on the run's own model.
"""

import os
from typing import get_args
from unittest import mock

import pytest
import torch
from attention_kernels import NAMES, stand_ins
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from families import (
    PROMPTS,
    SIZES,
    case_of,
    conditions,
    folder,
    load,
    noise,
    perturb,
    small_sources,
    tiered,
)
from tiny_run import ALONE, all_end, opened, ranks

from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Attention
from prefgrpo.models import MODELS
from prefgrpo.models import family as model_family
from prefgrpo.parallel.attention import LIMIT, SPLITTING, backends, errors
from prefgrpo.parallel.world import Layout, join
from prefgrpo.rollout.replay import replay
from prefgrpo.rollout.rollout import rollout
from prefgrpo.run.loading import unsupported
from prefgrpo.sde.schedule import make_schedule

CPU, SHAPE = torch.device("cpu"), (2, 24, 2, 16)
NAME = "_native_math"
BACKEND = AttentionBackendName(NAME)


FAULTS = {
    "gradient of k dropped": lambda q, k, v: (q, k.detach(), v),
    "all gradients dropped": lambda q, k, v: (q.detach(), k.detach(), v.detach()),
    "gradient doubled": lambda q, k, v: (q, k, 2 * v - v.detach()),
    "no scale": lambda q, k, v: (4 * q, k, v),
    "not finite": lambda q, k, v: (q, k, v / 0),
}


@pytest.fixture
def inject(monkeypatch):
    def put(change):
        real = _AttentionBackendRegistry._backends[BACKEND]
        names = _AttentionBackendRegistry._supported_arg_names[BACKEND]

        def faulty(query, key, value, **rest):
            query, key, value = change(query, key, value)
            return real(query, key, value, **{k: v for k, v in rest.items() if k in names})

        monkeypatch.setitem(_AttentionBackendRegistry._backends, BACKEND, faulty)

    return put


@pytest.mark.parametrize("masked", [False, True])
def test_right_backends_pass(masked):
    for name in ("native", NAME):
        assert max(errors(name, SHAPE, torch.float32, CPU, masked)) < 1e-5, name
        assert max(errors(name, SHAPE, torch.bfloat16, CPU, masked)) < 2e-2, name


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(inject, fault):
    inject(FAULTS[fault])
    output, gradient = errors(NAME, SHAPE, torch.float32, CPU)
    assert gradient > LIMIT[torch.float32]
    assert (output > LIMIT[torch.float32]) == (fault in ("no scale", "not finite"))


def config(attention="native", **more):
    values = {"model": str(folder("flux")), "dtype": "fp32", "data": {"prompts": "p.txt", "max_length": 24}}
    sizes = {"rollout": {"height": 32, "width": 32, "batch_size": 2}, "train": {"lora_rank": 2, "lora_alpha": 2}}
    return from_dict(values | sizes | {"attention": attention} | more)


def test_a_run_uses_it_everywhere_or_does_not_start(inject):
    case, out = case_of("flux"), {}
    for name in ("native", NAME):
        adapter = opened(config(name))
        x = torch.randn(2, *adapter.latent_shape(config().rollout), generator=torch.Generator().manual_seed(0))
        condition = conditions(adapter, case)
        out[name] = adapter.velocity(x, torch.full((2,), 0.5), condition, config().rollout)
        used = {block.attn.processor._attention_backend for block in adapter.blocks(adapter.transformer)}
        assert used == {AttentionBackendName(name)}
    assert torch.allclose(out["native"], out[NAME], atol=1e-5)
    inject(FAULTS["gradient of k dropped"])
    with pytest.raises(ConfigError, match=r"attention: _native_math is wrong on .* gradients by 100\.0%"):
        opened(config(NAME))


def test_backends_that_cannot_be():
    for attention, parallel in (("_native_math", {"ulysses": 2}), ("native", {"ring": 2})):
        (message,) = unsupported(config(attention, parallel=parallel))
        assert message.startswith("attention: flux trains under ring ") and message.endswith(attention), message
    with pytest.raises(ConfigError, match=r"attention: flash does not run here: .*flash"):
        opened(config("flash", dtype="bf16"))


def test_a_run_leaves_no_backend_behind():
    """diffusers has one active backend per process, for modules without their own: an estimate, a VAE, the next run."""
    before = _AttentionBackendRegistry.get_active_backend()[0]
    opened(config(NAME))
    assert _AttentionBackendRegistry.get_active_backend()[0] == before != BACKEND


# ---- every family, with stand-ins for the kernels of GPUs -----------------------------------------------------------

REFUSING = ("qwen_image_21", "hunyuan_video_15")
"""Families that choose their kernels themselves, or always mask their text."""


def settings(case, attention, place, **more):
    values = {"model": f"{place}/{case.family}", "family": case.family, "dtype": "bf16", "attention": attention}
    values |= {"data": {"prompts": "p.txt", "max_length": case.max_length}, "train": {"lora_rank": 4, "lora_alpha": 8}}
    return from_dict(values | {"rollout": {"height": 32, "width": 64, "batch_size": 2}} | more)


def one_step(config, case, world):
    """The LoRA's gradients of one replayed step of two prompts, and the largest |ratio - 1|."""
    adapter = perturb(opened(config, world))
    sampling = case.sampling(SIZES[1])
    condition = conditions(adapter, case, size=SIZES[1])
    schedule = make_schedule(adapter.sigmas(sampling), "flow", 0.7, (1,))
    (step,) = rollout(adapter, schedule, condition, torch.tensor([5, 9]), sampling, seed=1).steps
    new = replay(adapter, schedule, condition, step, sampling)
    (new.logp * torch.tensor([1.0, -0.5])).sum().backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in adapter.trainable()}
    if world.size > 1:
        world.sum_gradients([p for _, p in adapter.trainable()])
        gradients = {name: p.grad for name, p in adapter.trainable()}
    return torch.cat([g.flatten() for g in gradients.values()]), float((new.logp - step.logp).abs().max())


def trains_with(case, layout, world, place, want):
    """Check all backends of a family under a layout against the gradients of torch's own attention."""
    cls = model_family(case.family)
    family = case.family
    trained = backends(cls, layout)
    parallel = {"ring": layout.ring, "ulysses": layout.ulysses}
    with stand_ins() as calls:
        for name in NAMES:
            if layout.context > 1 and name not in SPLITTING:
                continue
            config = settings(case, name, place, parallel=parallel)
            if name not in trained:
                (text,) = unsupported(config)
                assert text.startswith(f"attention: {family} ") and text.endswith(f"got {name}"), text
                continue
            assert not unsupported(config)
            gradient, moved = one_step(config, case, world)
            assert moved == 0, (family, name, "the first ratio is not exactly 1")
            assert calls[name] > 0 and (layout.context == 1 or calls[f"{name} backward"] > 0), (family, name, calls)
            assert (gradient - want).norm() <= 0.1 * want.norm(), (family, name, layout)
    return trained


@pytest.mark.parametrize("case", tiered([case_of(name) for name in MODELS]))
def test_every_family_trains_with_its_backends(case, tmp_path):
    (tmp_path / case.family).symlink_to(folder(case.family))
    with small_sources():
        want, _ = one_step(settings(case, "native", tmp_path), case, ALONE)
        trained = trains_with(case, Layout(), ALONE, tmp_path, want)
    assert (set(trained) >= set(NAMES)) == (case.family not in REFUSING)


def test_a_batch_of_one_prompt_needs_no_mask():
    """The families whose texts differ in length, so that they run with kernels that take none."""
    for family in ("qwen_image", "z_image", "hunyuan_video"):
        adapter = load(case_of(family))
        case = case_of(family).unguided()
        sampling = case.sampling(SIZES[1])
        condition = conditions(adapter, case, PROMPTS, SIZES[1])
        x = noise(adapter, sampling, 2)
        masks = []
        real = torch.nn.functional.scaled_dot_product_attention

        def noted(*args, attn_mask=None, masks=masks, real=real, **kwargs):
            masks.append(attn_mask)
            return real(*args, attn_mask=attn_mask, **kwargs)

        with torch.no_grad(), mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", noted):
            adapter.velocity(x, torch.tensor([0.3, 0.7]), condition, sampling)
        refined = 2 if family == "hunyuan_video" else 0  # masks of its text refiner, which keeps torch's attention
        assert masks and sum(mask is not None for mask in masks) <= refined, family


SHORT = {"none": "no mask", "padding": "no mask on one GPU", "always": "masks text", "own": "own kernels"}


def support_table():
    """Family × (one GPU, Ulysses, ring) → backends, from the code's own table."""
    everything = get_args(Attention)

    def cell(cls, layout):
        names = backends(cls, layout)
        if len(names) == len(everything):
            return "all"
        return ", ".join(f"`{name}`" for name in names) or "refused"

    rows: dict[tuple[str, ...], list[str]] = {}
    for name in MODELS:
        cls = model_family(name)
        cells = [cell(cls, layout) for layout in (Layout(), Layout(ulysses=2), Layout(ring=2))]
        rows.setdefault((SHORT[cls.attention_masks], *cells), []).append(name)
    lines = ["| family | masks | one GPU | Ulysses | ring |", "|---|---|---|---|---|"]
    return lines + [f"| {', '.join(f'`{n}`' for n in names)} | {' | '.join(row)} |" for row, names in rows.items()]


def test_the_table_of_the_documentation_is_the_codes(root):
    text = (root / "docs" / "scale.md").read_text(encoding="utf-8")
    table = text.partition("<!-- attention: begin -->")[2].partition("<!-- attention: end -->")[0]
    assert table.split("\n")[1:-1] == support_table(), "\n".join(support_table())


def split_processes():
    """Runs in the new process: all backends of $FAMILY under Ulysses and, where supported, ring attention."""
    torch.set_num_threads(1)
    case = case_of(os.environ["FAMILY"])
    place = os.environ["PLACE"]
    cls = model_family(case.family)
    with small_sources():
        want, _ = one_step(settings(case, "native", place), case, ALONE)
        for layout in (Layout(ulysses=2), Layout(ring=2)):
            if trained := backends(cls, layout):
                parallel = {"ring": layout.ring, "ulysses": layout.ulysses}
                world = join(settings(case, trained[-1], place, parallel=parallel))
                trains_with(case, layout, world, place, want)
                if "native" in trained:
                    native, moved = one_step(settings(case, "native", place, parallel=parallel), case, world)
                    assert moved == 0 and (native - want).norm() <= 0.1 * want.norm()
    os._exit(0)


SPLIT = [case_of(name) for name in MODELS if model_family(name).context_parallel]


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_every_family_trains_with_them_under_context_parallelism(case, tmp_path):
    (tmp_path / case.family).symlink_to(folder(case.family))
    runs = ranks(tmp_path / "run.yaml", 2, hook=split_processes, PLACE=str(tmp_path), FAMILY=case.family)
    all_end(runs, seconds=600)

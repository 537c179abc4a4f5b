"""Ring attention against one process: the op with every backend offered for it, and whole training steps.

Why these cases: no CPU attention returns log-sum-exps, so formulas stand for the kernels (`ops_cases`); what diffusers
does around them is tested, since its backward was wrong without an error up to 0.39 (huggingface/diffusers#14265). Four
processes in one ring, because the two directions of a ring of two are the same, and ring × Ulysses; numbers of tokens
that are odd in each process. The planted faults are what such a code gets wrong: the comparison must see each. Whole
steps: with joint text and with cross-attention, whose keys are not split; with fused blocks; whole runs.
"""

import itertools
import math
import os
from dataclasses import replace
from unittest import mock

import ops_cases
import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import dispatch_attention_fn
from ranks import all_end, fuse_on_cpu, ranks, start_ranks, trained
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from world import BRIGHTNESS, linked, recipe, rows, tiny_world

from prefgrpo.models import MODELS
from prefgrpo.models import family as family_class
from prefgrpo.parallel import ring
from prefgrpo.parallel.attention_backend import backends
from prefgrpo.parallel.world import Layout, join
from tests.parallel import test_parallelize
from tests.parallel.test_parallelize import alone, compare, one_step

RINGED = [name for name in MODELS if family_class(name).context_parallel == "ring"]
TWO = {"ring": 2}
LAYOUTS = {
    2: {"ring": TWO, "ulysses": {"ulysses": 2}},  # of torch's flash attention too, which runs on GPUs
    4: {"ring": {"ring": 4}, "ring×ulysses": TWO | {"ulysses": 2}},
}
MORE = {"shard×ring": {"shard": 2} | TWO, "dp×ring": TWO}
"""Of four processes, with FLUX only."""

# ---- the op ---------------------------------------------------------------------------------------------------------


def errors(name, degree, ulysses):
    """Errors of this process's part of the output and of the gradients of q, k and v, relative to the largest element
    of autograd's for all tokens, in fp64: 7 tokens per process, 4 heads of width 8, scores up to about 20."""
    size = dist.get_world_size()
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    q, k, v, g = (torch.randn(2, 7 * size, 4, 8, generator=generator) for _ in range(4))
    q = q * 4
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", wide[0], wide[1]) * 8**-0.5
    exact = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), wide[2])
    exact.backward(g.double())
    config = ContextParallelConfig(ring_degree=degree, ulysses_degree=ulysses)
    mesh = init_device_mesh("cpu", (degree, ulysses), mesh_dim_names=("ring", "ulysses"))
    config.setup(rank, size, torch.device("cpu"), mesh)
    mine = slice(7 * rank, 7 * rank + 7)
    q, k, v = (x[:, mine].clone().requires_grad_() for x in (q, k, v))
    out = dispatch_attention_fn(q, k, v, backend=name, parallel_config=ParallelConfig(context_parallel_config=config))
    if ulysses == 1:  # recomputation drops what is saved, and nothing else
        kept = {**vars(out.grad_fn), **out.grad_fn.options}
        assert not [name for name, value in kept.items() if isinstance(value, torch.Tensor)], kept
    out.backward(g[:, mine])
    pairs = zip((out, q.grad, k.grad, v.grad), (exact.detach(), *(x.grad for x in wide)), strict=True)
    return [float((got.detach() - want[:, mine]).abs().max() / want.abs().max()) for got, want in pairs]


def scaled_lse():
    """Log-sum-exps to base 2."""
    real = ops_cases.attend

    def wrong(*given):
        out, lse = real(*given)
        return out, lse / math.log(2)

    return mock.patch.object(ops_cases, "attend", wrong)


def stale_keys():
    """Every backward with the process's own keys, as up to diffusers 0.39."""
    real = attention_dispatch._native_flash_attention_backward_op

    def wrong(ctx, grad_out, *_, query, key, value, out, lse):
        own = ctx.saved_tensors
        return real(ctx, grad_out, query=query, key=own[1], value=own[2], out=out, lse=lse)

    return mock.patch.object(attention_dispatch, "_native_flash_attention_backward_op", wrong)


def other_direction():
    """Gradients travel against the keys, as in diffusers 0.42.1: in a ring of four, three places on is one back."""
    real = ring._pass_on
    calls = itertools.count()

    def wrong(sent, group):
        if next(calls) in (4, 6, 8, 9):  # after three of keys in the forward pass, keys and gradients in turn
            sent = real(real(sent, group)(), group)()
        return real(sent, group)

    return mock.patch.object(ring, "_pass_on", wrong)


FAULTS = {"scaled log-sum-exps": scaled_lse, "stale keys": stale_keys, "other direction": other_direction}


def ops():
    """Runs in the new process: all backends under a ring of four and under ring × Ulysses, then the planted faults."""
    torch.set_num_threads(1)
    ops_cases.register_flash()
    ring.install()
    world = join()
    for sizes in ((4, 1), (2, 2)):
        for name in ops_cases.FLASH:
            found = errors(name, *sizes)
            assert max(found) < 1e-5, (name, sizes, found)
    for fault, plant in FAULTS.items():
        with plant():
            found = errors("_native_flash", 4, 1)
        assert max(max(each) for each in world.all_gather_object(found)) > 0.05, (fault, found)
    os._exit(0)


@pytest.mark.dist
def test_ring_attention_is_exact_with_every_backend_offered(tmp_path):
    offered = {name for family in RINGED for name in backends(family_class(family), Layout(ring=2))}
    others = {"fa3", "fa4"}  # other kernels of torch's op, which `_native_flash` calls
    assert offered - others == set(ops_cases.FLASH)
    all_end(start_ranks([], tmp_path / "op.log", 4, hook=ops), seconds=300)


# ---- training steps -------------------------------------------------------------------------------------------------


def cells():
    """Runs in the new process: every layout with a ring of the families in $FAMILY against one process with torch's own
    attention."""
    torch.set_num_threads(1)
    ops_cases.register_flash()
    if "FUSED" in os.environ:
        fuse_on_cpu()
    place = os.environ["PLACE"]
    size = int(os.environ["WORLD_SIZE"])
    for family in os.environ["FAMILY"].split():
        both = size == 2 and "FUSED" not in os.environ
        for lora in (True, False) if both else (True,):
            for dtype in os.environ["DTYPES"].split():
                given = (place, family, lora, dtype)
                layouts = LAYOUTS[size] | (MORE if family == "flux" and size == 4 else {})
                configs = {
                    name: replace(test_parallelize.settings(*given, layout), attention="_native_flash")
                    for name, layout in layouts.items()
                }
                worlds = {name: join(config) for name, config in configs.items()}
                if "FUSED" in os.environ:  # what is not recomputed with its block, a fused block computes again itself
                    configs = {name: without_recomputation(config) for name, config in configs.items()}
                one = test_parallelize.settings(*given, {})
                want = one_step(one, alone(one))
                for name, config in configs.items():
                    cell = f"{family} {'LoRA' if lora else 'all weights'} {dtype} {name}"
                    compare(cell, one_step(config, worlds[name]), want, bits=False, dtype=dtype)
    os._exit(0)


def without_recomputation(config):
    return replace(config, train=replace(config.train, gradient_checkpointing=0.0))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = linked(tmp_path_factory.mktemp("ring"), RINGED)
    (folder / "prompts.txt").write_text("\n".join(test_parallelize.TEXTS) + "\n")
    return folder


FULL = pytest.mark.full
CELLS = [
    pytest.param(2, "flux wan22", "fp32 bf16", {}, id="2", marks=FULL),
    pytest.param(2, " ".join(RINGED), "fp32", {"FUSED": "1"}, id="2 fused", marks=FULL),
    pytest.param(4, "flux wan22_i2v", "fp32", {}, id="4", marks=FULL),
]


@pytest.mark.dist
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size, families, dtypes, env", CELLS)
def test_a_ring_changes_nothing(place, size, families, dtypes, env):
    file = place / f"{size}{''.join(env)}.yaml"
    given = {"PLACE": str(place), "FAMILY": families, "DTYPES": dtypes} | env
    all_end(ranks(file, size, hook=cells, **given), seconds=1700)


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.full
def test_a_run_with_a_ring_is_resumed_without(tmp_path):
    """A ring of two trains two steps and is resumed by one process; the LoRA is that of one process throughout, with
    torch's choice of attention. A smooth reward: a file's size jumps by a byte where pixels differ by rounding."""
    place = tiny_world(tmp_path)
    options = {"train": {"steps": 4, "gradient_checkpointing": 1.0}, "eval": {"every": 0}, "rewards": BRIGHTNESS}
    flash = options | {"attention": "_native_flash"}
    file = recipe(place, "ring", **flash, parallel=TWO)
    all_end(ranks(file, 2, "--train.steps", "2", hook=ops_cases.register_flash), seconds=600)
    assert "resumed from" in trained(recipe(place, "ring", **flash), "--resume")
    trained(recipe(place, "alone", **options))
    got, want = (load_file(place / "runs" / n / "lora" / "pytorch_lora_weights.safetensors") for n in ("ring", "alone"))
    trained_from_0 = [name for name in want if "lora_B" in name]
    got, want = (torch.cat([weights[name].flatten() for name in trained_from_0]) for weights in (got, want))
    apart = (got - want).norm() / want.norm()  # AdamW gives single weights with a gradient near 0 any sign
    assert apart < 0.03, apart
    assert [row["step"] for row in rows(place / "runs" / "ring")] == [1, 2, 3, 4]

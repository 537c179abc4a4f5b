"""Ulysses attention of fused blocks: as many copies as counted, started in time, with the bits of diffusers' own.

Why these cases: copies and order are counted on a group of eight that sends nothing, at Wan's and FLUX's sizes. Outputs
and gradients are compared bit by bit with diffusers' templated attention in the same processes, and in fp64 with one
process that has all tokens: self-attention, joint attention and one projection for everything (FLUX.2); with torch's
choice of a kernel and with its flash attention; kept, recomputed, and recomputed but for attention's output. What
is left to diffusers is listed.
"""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models.transformers import transformer_flux, transformer_flux2, transformer_wan
from ranks import all_end, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.ulysses_copies import count, main
from prefgrpo.models.blocks import components, forwards
from prefgrpo.models.blocks.recompute import recomputes
from prefgrpo.models.blocks.ulysses import ulysses

HEADS = 4
WIDTH = 16
SAMPLES = 2
C = HEADS * WIDTH


@pytest.mark.parametrize("name", ["Wan 14B", "FLUX.1"])
def test_copies_of_an_attention(name):
    """v and the output forward, their gradients backward: 4 passes, where diffusers makes at least 28."""
    forward, backward = count(name, ours=True)
    assert (forward.copies, forward.transfers) == (2, 4)
    assert (backward.copies, backward.transfers) == (2, 4)
    stock = count(name, ours=False)
    assert stock[0].copies >= 12 and stock[1].copies >= 16 and [c.transfers for c in stock] == [4, 4]


def test_the_table_in_the_docs(capsys):
    main()
    page = (Path(__file__).parents[2] / "docs/scale.md").read_text(encoding="utf-8")
    table = page.partition("<!-- ulysses copies -->")[2].partition("<!-- /ulysses copies -->")[0]
    assert table.strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize("name, layers", [("Wan 14B", 1), ("FLUX.1", 2)])
def test_queries_and_keys_travel_while_values_are_projected(name, layers):
    """And their gradients while v's projection runs backward. `layers`: projections of q, one for each stream."""
    product = ["product"] * layers
    forward, backward = count(name, ours=True)
    assert forward.events == [
        *product, *product, "start", "start", *product, "start", "wait", "wait", "wait", "start", "wait", *product,
    ]  # fmt: skip
    assert backward.events == [
        *product, "start", "wait", "start", "start", "start", "wait", *product, "wait", "wait", *product, *product,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "ring, degree, mask, ours",
    [(1, 2, None, True), (1, 2, torch.ones(1), False), (2, 2, None, False), (2, 1, None, False)],
)
def test_what_diffusers_splits(ring, degree, mask, ours):
    """Attention with a mask, and ring attention, with Ulysses or alone."""
    mesh = SimpleNamespace(get_group=lambda: SimpleNamespace(group_name="group"))
    config = SimpleNamespace(ring_degree=ring, ulysses_degree=degree, _ulysses_mesh=mesh)
    processor = SimpleNamespace(_parallel_config=SimpleNamespace(context_parallel_config=config))
    assert ulysses(SimpleNamespace(processor=processor), mask) == (("group", degree) if ours else None)


def register_flash():
    """torch's flash attention of a CPU as that of a GPU, which diffusers calls by name; in this process only."""
    aten = torch.ops.aten
    library = torch.library.Library("aten", "IMPL")

    def forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
        none = torch.empty(0)
        return out, lse, none, none, query.shape[2], key.shape[2], none, none, none

    def backward(grad, query, key, value, out, logsumexp, *_, scale=None, **__):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, logsumexp, 0.0, False, scale=scale
        )

    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    return library


def wan(attn, streams, tables):
    """Wan's self-attention."""
    return [attn.to_out[0](components.self_attention(attn, *streams, tables))]


def flux(attn, streams, tables):
    """FLUX.1's joint attention."""
    zero = streams[0].new_zeros(SAMPLES, C)
    text, latents = (components.Stream(x, [zero, zero, zero], torch.nn.Identity()) for x in streams)
    out, out_text = components.joint_attention(attn, latents, text, tables, None)
    return [out_text, out]


def flux2(attn, streams, tables):
    """FLUX.2's single-stream block, whose one projection also makes the feed-forward's input."""
    norm = SimpleNamespace(eps=1e-6)
    block = SimpleNamespace(attn=attn, norm=norm)
    modulation = streams[0].new_ones(SAMPLES, 3 * C)
    return [forwards.flux2_single(block, streams[0], None, modulation, tables)]


KINDS = {
    "Wan": (wan, (12,), lambda: transformer_wan.WanAttention(
        C, heads=HEADS, dim_head=WIDTH, processor=transformer_wan.WanAttnProcessor()
    )),
    "FLUX.1": (flux, (4, 8), lambda: transformer_flux.FluxAttention(
        C, heads=HEADS, dim_head=WIDTH, added_kv_proj_dim=C, context_pre_only=False, bias=True
    )),
    "FLUX.2": (flux2, (12,), lambda: transformer_flux2.Flux2ParallelSelfAttention(C, heads=HEADS, dim_head=WIDTH)),
}  # fmt: skip
"""The attention of a fused block, the tokens of its streams, and diffusers' module."""


def keeps_attention():
    """Contexts in which a recomputed block keeps the output of its attention."""
    ops = torch.ops.aten
    kept = (ops._scaled_dot_product_flash_attention.default, ops._scaled_dot_product_flash_attention_for_cpu.default)

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


RECOMPUTED = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
WAYS = {
    "keeping inputs": lambda run, *args: recomputes(lambda _, *given: run(*given))(SimpleNamespace(), *args),
    "recomputed": lambda run, *args: RECOMPUTED(run, *args),
    "recomputed but for attention": lambda run, *args: RECOMPUTED(run, *args, context_fn=keeps_attention),
}
"""How a block keeps what its backward pass needs."""


def results(run, attn, streams, tables, upstream, way=None):
    """Outputs, then gradients of the streams and of the weights."""
    leaves = [x.detach().clone().requires_grad_() for x in streams]
    outputs = WAYS[way](run, attn, leaves, tables) if way else run(attn, leaves, tables)
    gradients = torch.autograd.grad(outputs, [*leaves, *attn.parameters()], upstream)
    return [t.detach() for t in (*outputs, *gradients)]


def equal(got, want):
    """Bit by bit, but for gradients of the norms' weights: torch's sum over tokens depends on their strides."""
    close = [torch.equal(a, b) or (a.shape == (WIDTH,) and far(a, b) < 1e-6) for a, b in zip(got, want, strict=True)]
    return all(close)


def far(a, b):
    """Largest difference, relative to the largest element."""
    return float((a - b).abs().max() / b.abs().max())


def cases():
    """Runs in the new process: every case, in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    library = register_flash()
    size = dist.get_world_size()
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("ring", "ulysses"))
    config = ContextParallelConfig(ulysses_degree=size)
    config.setup(rank, size, torch.device("cpu"), mesh)
    parallel = SimpleNamespace(context_parallel_config=config)
    for name, (run, tokens, make) in KINDS.items():
        torch.manual_seed(0)
        attn = make()
        attn.processor._attention_backend = "native"
        attn.processor._parallel_config = parallel
        whole = [torch.randn(SAMPLES, count, C) for count in tokens]
        upstream = [torch.randn(SAMPLES, count, C) for count in tokens]
        tables = [torch.randn(sum(tokens), WIDTH) for _ in range(2)]
        parts = [x.chunk(size, 1)[rank] for x in whole]
        upstream_of_parts = [x.chunk(size, 1)[rank] for x in upstream]
        of_parts = [torch.cat([t.chunk(size)[rank] for t in table.split(list(tokens))]) for table in tables]

        for dtype, backend in ((torch.float32, "native"), (torch.float32, "_native_flash"), (torch.bfloat16, "native")):
            cell = f"{name} {dtype} {backend}"
            attn.to(dtype)
            attn.processor._attention_backend = backend
            streams = [x.to(dtype) for x in parts]
            given = run, attn, streams, of_parts, [x.to(dtype) for x in upstream_of_parts]
            with mock.patch.object(components, "ulysses", lambda *_: None):
                stock = results(*given)
            for way in (None, *WAYS):
                assert equal(results(*given, way), stock), f"{cell}, {way}"
            with torch.no_grad():
                outputs = run(attn, streams, of_parts)
            assert equal(outputs, stock[: len(outputs)]), f"{cell}, without gradient"

        attn.double()  # and one process with all tokens
        attn.processor._attention_backend = "native"
        got = results(run, attn, *([x.double() for x in t] for t in (parts, of_parts, upstream_of_parts)))
        attn.processor._parallel_config = None
        want = results(run, attn, *([x.double() for x in t] for t in (whole, tables, upstream)))
        local = 2 * len(tokens)  # outputs and gradients of tokens; those of weights add up
        for a, b in zip(got[:local], want[:local], strict=True):
            torch.testing.assert_close(a, b.chunk(size, 1)[rank], rtol=1e-10, atol=1e-10)
        for a, b in zip(got[local:], want[local:], strict=True):
            dist.all_reduce(a)
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    del library
    os._exit(0)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_bits_of_diffusers(tmp_path, size):
    all_end(ranks(tmp_path / "ulysses.yaml", size, hook=cases), seconds=120)

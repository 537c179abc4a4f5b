"""The pointwise ops of transformer blocks, in one table: every check below holds for every op.

Oracles: each formula in fp64, written here in another way than the ops (rotations as complex numbers), with autograd's
gradients; diffusers' own modules, which the reference equals bit for bit; autograd's numerical gradients. Kernels
round once: a result in bf16 is within half a unit in the last place of the fp64 one, and closer to it than eager's.
"""

import importlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from ops_cases import BF16, DEVICE, F32, F64, HERE, INTERPRETED, few, serve
from torch import Tensor

from prefgrpo.ops import _backend, gated_residual, layernorm_modulate, qk_norm_rope
from prefgrpo.ops._inputs import aligned, unit_stride
from tests.ops.test_compile import Recorder

BACKENDS = [name for name in HERE if name in ("triton", "torch")]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
MANY = {"torch": 1025, "triton": 100 if INTERPRETED else 1025}
"""Shapes per op and dtypes in the full tier; the interpreter takes up to seconds for one."""
seeds = pytest.mark.parametrize(
    ("backend", "cases"),
    [
        pytest.param(name, cases, marks=marks, id=f"{name}-{cases[0]}-{cases[-1]}")
        for name in BACKENDS
        for cases, marks in ((range(25), ()), (range(25, MANY[name]), pytest.mark.full))
    ],
)
try:  # only the test that compares with them needs diffusers' modules
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.normalization import AdaLayerNormZero, FP32LayerNorm
    from diffusers.models.transformers import transformer_wan
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
except ImportError:
    transformer_wan = None
Inputs = dict[str, Any]
BATCHED = ("x", "y", "q", "k", "q2", "k2", "shift", "scale", "gate")
"""Inputs that have a row per sample."""


class Draw:
    """Random inputs of one case, in memory layouts that models have."""

    def __init__(self, seed: int, dtype: torch.dtype, vector_dtype: torch.dtype, tiny: bool = False) -> None:
        self.pick = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.vector_dtype = vector_dtype
        self.tiny = tiny
        self.batch, self.tokens = self.pick.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (2, 3)))
        if self.pick.random() < 0.08:  # more tokens than one partial sum has
            self.batch = 1
            self.tokens = 37
        if tiny:
            self.tokens = min(self.tokens, 3)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def rows(self, *shape: int) -> Tensor:
        """[B, S, …]: contiguous, some of the tokens, some columns of a wider projection, or transposed."""
        t = (10 ** self.pick.uniform(-1, 1) * self.normal(self.batch, self.tokens, *shape)).to(self.dtype)
        kind = self.pick.choice(("contiguous", "tokens", "columns", "turned"))
        if kind == "tokens":
            t = torch.cat([t, t], 1)[:, self.tokens :]
        if kind == "columns":
            t = torch.cat([t, t], 2)[:, :, t.shape[2] :]
        if kind == "turned":
            t = t.mT.contiguous().mT
        return t.to(DEVICE)

    def vectors(self, count: int, channels: int) -> list[Tensor]:
        """[B, C] each: chunks of one projection, tensors of their own, or one row for all samples."""
        t = self.normal(self.batch, (count + 2) * channels).to(self.vector_dtype).to(DEVICE)
        kind = self.pick.choice(("chunks", "own", "one"))
        if kind == "one":
            t = t[:1].expand_as(t)
        parts = list(t.chunk(count + 2, 1)[1:-1])
        return [part.clone() for part in parts] if kind == "own" else parts

    def channels(self) -> int:
        if self.tiny:
            return self.pick.choice((4, 5, 6))
        return self.pick.choice((5, 7, 16, 48, 64, 77, 128, 130, 192, 257, 1024, 1536))


@dataclass
class Op:
    """One op."""

    call: Callable[..., Any]
    """The public function, with the inputs' names as keywords."""
    draw: Callable[[Draw], Inputs]
    exact: Callable[..., Any]
    """The formula, in the inputs' dtype."""
    leaves: tuple[str, ...]
    """Inputs with a gradient."""


QK = tuple(f"{name}{n}{kind}" for n in ("", "2") for name in ("q", "k") for kind in ("", "_weight"))


def draw_modulate(d: Draw) -> Inputs:
    channels = d.channels()
    shift, scale = d.vectors(2, channels)
    x = d.rows(channels) + 2 * d.pick.random()
    return {"x": x, "shift": shift, "scale": scale, "eps": d.pick.choice((1e-6, 1e-5))}


def exact_modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    variance = x.square().mean(2) - x.mean(2).square()
    normed = (x - x.mean(2, keepdim=True)) * (variance.clamp_min(0) + eps).pow(-0.5)[..., None]
    return normed + torch.einsum("bsc,bc->bsc", normed, scale) + shift[:, None]


def draw_residual(d: Draw) -> Inputs:
    channels = d.channels()
    (gate,) = d.vectors(1, channels)
    return {"x": d.rows(channels), "y": d.rows(channels), "gate": gate}


def exact_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return torch.stack([torch.addcmul(a, b, c) for a, b, c in zip(x, y, gate, strict=True)])


def call_norm_rope(q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, **rest: Any) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` of one stream, or of two if there is a q2."""
    second = [rest.pop(name, None) for name in ("q2", "k2", "q2_weight", "k2_weight")]
    first = (q, k, q_weight, k_weight)
    return qk_norm_rope(*(first if second[0] is None else zip(first, second, strict=True)), **rest)


def draw_norm_rope(d: Draw) -> Inputs:
    """Head widths of models and others; one or two streams, norms and tables of every kind."""
    heads = d.pick.choice((1, 2, 3, 5, 9))
    dim = d.pick.choice((4, 6) if d.tiny else (6, 16, 24, 48, 64, 96, 128))
    if d.tokens == 37:
        heads = 1
    norm = d.pick.choice(("head", "head", "all heads", "none"))
    width = heads * dim if norm == "all heads" else dim
    streams = d.pick.randint(1, 2)
    inputs: Inputs = {"eps": d.pick.choice((1e-6, 1e-5)), "use_real_unbind_dim": d.pick.choice((-1, -2))}
    for n in ("", "2")[:streams]:
        for name in ("q", "k"):
            inputs[f"{name}{n}"] = d.rows(heads, dim)
            weight = (1 + 0.3 * d.normal(width)).to(d.dtype).to(DEVICE)
            inputs[f"{name}{n}_weight"] = None if norm == "none" else weight
    table_dtype = torch.promote_types(d.dtype, F32)
    lead = d.pick.choice(((), (), (d.batch,)))
    for name in ("cos", "sin"):
        inputs[name] = d.normal(*lead, streams * d.tokens, dim).to(DEVICE, table_dtype)
    kind = d.pick.choice(("full", "full", "per pair", "none"))
    if kind == "per pair":
        inputs |= {name: inputs[name][..., ::2] for name in ("cos", "sin")}
    if kind == "none":
        inputs |= {"cos": None, "sin": None}
    return inputs


def exact_norm_rope(eps: float, use_real_unbind_dim: int, cos: Any, sin: Any, **parts: Any) -> tuple[Tensor, ...]:
    """Pairs a + ib turned by a complex product; tables with two values per pair as two products, one for each part."""
    out = []
    for name in ("q", "k"):
        streams = []
        for n in ("", "2"):
            x = parts.get(f"{name}{n}")
            weight = parts.get(f"{name}{n}_weight")
            if x is None:
                continue
            if weight is not None:
                dims = (3,) if len(weight) == x.shape[3] else (2, 3)
                x = x / (torch.linalg.vector_norm(x, dim=dims, keepdim=True).square() / len(weight) + eps).sqrt()
                x = x * weight.view(-1, x.shape[3])
            streams.append(x)
        x = torch.cat(streams, 1)
        if cos is not None:
            half = x.shape[3] // 2
            neighbours = (slice(0, None, 2), slice(1, None, 2))
            first, second = neighbours if use_real_unbind_dim == -1 else (slice(half), slice(half, None))
            pairs = torch.complex(x[..., first], x[..., second])
            parts_of = [slice(None)] * 2 if cos.shape[-1] == half else [first, second]
            turns = [torch.complex(cos[..., part], sin[..., part]).unsqueeze(-2) for part in parts_of]
            result = x.clone()
            result[..., first] = (pairs * turns[0]).real
            result[..., second] = (pairs * turns[1]).imag
            x = result
        out.append(x)
    return tuple(out)


OPS = {
    "layernorm_modulate": Op(layernorm_modulate, draw_modulate, exact_modulate, ("x", "shift", "scale")),
    "gated_residual": Op(gated_residual, draw_residual, exact_residual, ("x", "y", "gate")),
    "qk_norm_rope": Op(call_norm_rope, draw_norm_rope, exact_norm_rope, QK),
}
each_op = pytest.mark.parametrize("name", OPS)


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def values(call: Callable[..., Any], op: Op, inputs: Inputs, upstream: list[Tensor]) -> list[Tensor]:
    """The results and the gradients of the leaves, whose views keep their layout."""
    leaves = [n for n in op.leaves if inputs.get(n) is not None]
    held = {n: inputs[n].detach().requires_grad_() for n in leaves}
    result = outputs(call(**{**inputs, **held}))
    grads = torch.autograd.grad(result, list(held.values()), upstream[: len(result)])
    return [t.detach() for t in (*result, *grads)]


def gradients_of(op: Op, inputs: Inputs, seed: int) -> list[Tensor]:
    """Upstream gradients, the second one expanded from one number."""
    with torch.no_grad():
        shapes = [(t.shape, t.dtype) for t in outputs(op.call(**inputs))]
    g = torch.Generator().manual_seed(seed)
    out = [torch.randn(shape, generator=g).to(DEVICE, dtype) for shape, dtype in shapes]
    return [out[0], *(t.flatten()[:1].expand(t.shape) for t in out[1:])]


def wide(inputs: Inputs) -> Inputs:
    return {k: v.double() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def half_ulp(want: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place at the fp64 values."""
    digits = {BF16: 8, F32: 24}[dtype]
    return torch.ldexp(torch.ones_like(want), torch.frexp(want).exponent - digits - 1)


MIXTURES = {"fp32": (F32, F32), "bf16": (BF16, BF16), "bf16, vectors fp32": (BF16, F32)}
each_mixture = pytest.mark.parametrize(
    ("name", "mixture"), [(n, m) for n in OPS for m in list(MIXTURES)[: 2 if n == "qk_norm_rope" else 3]]
)


@each_mixture
@seeds
def test_random_shapes_against_fp64(name, backend, mixture, cases):
    """Kernels round once; over all cases, they are closer to fp64 than eager in bf16, and as close in fp32."""
    op = OPS[name]
    ours = []
    eager = []
    for seed in few(backend, cases):
        inputs = op.draw(Draw(seed, *MIXTURES[mixture]))
        upstream = gradients_of(op, inputs, seed)
        want = values(op.exact, op, wide(inputs), [g.double() for g in upstream])
        with serve(backend):
            got = values(op.call, op, inputs, upstream)
        with serve("torch"):
            reference = values(op.call, op, inputs, upstream)
        for g, w, r in zip(got, want, reference, strict=True):
            assert g.shape == w.shape and g.dtype == r.dtype
            largest = w.abs().max()
            error = (g.double() - w).abs()
            rounding = 2**-4 * largest if backend == "torch" and g.dtype == BF16 else half_ulp(w, g.dtype)
            assert float(((error - rounding) / largest).max()) <= 1e-5, seed
            ours.append((error / largest).square().mean().sqrt())
            eager.append(((r.double() - w).abs() / largest).square().mean().sqrt())
    if backend == "triton":
        assert sum(ours) <= {"fp32": 1.25}.get(mixture, 1.001) * sum(eager)


@each_mixture
@each_backend
def test_a_token_has_the_same_bits_anywhere(name, backend, mixture):
    """With and without gradient, twice, and in a batch of its sample alone; gradients likewise."""
    op = OPS[name]
    for seed in few(backend, range(3)):
        inputs = op.draw(Draw(seed, *MIXTURES[mixture]))
        upstream = gradients_of(op, inputs, seed)
        with serve(backend):
            first, again = (values(op.call, op, inputs, upstream) for _ in range(2))
            with torch.no_grad():
                plain = outputs(op.call(**inputs))
            alone = {
                k: v[:1] if k in BATCHED or (k in ("cos", "sin") and v is not None and v.dim() == 3) else v
                for k, v in inputs.items()
            }
            single = values(op.call, op, alone, [g[:1] for g in upstream])
        same = [torch.equal(a, b) for a, b in zip(first, again, strict=True)]
        assert all(same) and all(torch.equal(a, b) for a, b in zip(plain, first, strict=False))
        leaves = [n for n in op.leaves if inputs.get(n) is not None]
        for n, (a, b) in enumerate(zip(first, single, strict=True)):
            if n < len(plain) or leaves[n - len(plain)] in BATCHED:
                assert torch.equal(a[:1], b)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@each_backend
def test_groups_of_heads_are_another_layout(backend, dtype):
    """Of results and their gradients, with the bits of the usual one; only torch's sum for a weight depends on it."""
    op = OPS["qk_norm_rope"]
    drawn = [op.draw(Draw(seed, dtype, dtype)) for seed in few(backend, range(12))]
    drawn = [inputs for inputs in drawn if inputs["q"].shape[2] > 1]
    assert len(drawn) > (2 if backend == "triton" else 6)
    for inputs in drawn:
        heads = inputs["q"].shape[2]
        groups = 3 if heads == 9 else heads
        upstream = gradients_of(op, inputs, heads)
        names = [n for n in op.leaves if inputs.get(n) is not None]
        with serve(backend):
            want = values(op.call, op, inputs, upstream)
            held = {n: inputs[n].detach().requires_grad_() for n in names}
            out = op.call(**{**inputs, **held}, groups=groups)
            sent = [g.unflatten(2, (groups, -1)).permute(2, 1, 0, 3, 4).contiguous() for g in upstream]
            grads = torch.autograd.grad(out, list(held.values()), sent)
        assert all(t.is_contiguous() and t.shape[0] == groups for t in out)
        got = [*(t.permute(2, 1, 0, 3, 4).flatten(2, 3) for t in out), *grads]
        for name, a, b in zip(("q", "k", *names), got, want, strict=True):
            if backend == "torch" and name.endswith("weight"):
                assert torch.allclose(a, b, rtol=1e-2 if dtype == BF16 else 1e-5, atol=1e-5)
            else:
                assert torch.equal(a, b), name


@each_op
def test_gradients_of_the_reference(name):
    op = OPS[name]
    for seed in range(8):
        inputs = op.draw(Draw(seed, F64, F64, tiny=True))
        names = [n for n in op.leaves if inputs.get(n) is not None]
        leaves = [inputs[n].detach().clone().requires_grad_() for n in names]
        call = lambda *t: op.call(**{**inputs, **dict(zip(names, t, strict=True))})  # noqa: E731, B023
        assert torch.autograd.gradcheck(call, leaves)


def modules_modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """AdaLayerNormZero's, and Wan's, whose vectors are in fp32."""
    channels = x.shape[2]
    if scale.dtype != x.dtype:
        norm = FP32LayerNorm(channels, eps, elementwise_affine=False)
        return (norm(x.float()) * (1 + scale[:, None]) + shift[:, None]).type_as(x)
    module = AdaLayerNormZero(channels)
    module.norm.eps = eps
    module.silu = module.linear = torch.nn.Identity()
    return module(x, emb=torch.cat([shift, scale, *[shift] * 4], 1))[0]


def modules_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """The statements of FLUX's single block and, for a gate in fp32, of Wan's block."""
    if gate.dtype != x.dtype:
        return (x.float() + y * gate[:, None]).type_as(x)
    return x + gate.unsqueeze(1) * y


def wan_attention_inputs(q: Tensor, k: Tensor, weights: list[Tensor], cos: Tensor, sin: Tensor, eps: float) -> Any:
    """What Wan's processor passes to attention."""
    heads, dim = q.shape[2:]
    attn = transformer_wan.WanAttention(heads * dim, heads, dim, eps, processor=transformer_wan.WanAttnProcessor())
    attn.to_out[0] = torch.nn.Identity()
    for norm, weight in zip((attn.norm_q, attn.norm_k), weights, strict=True):
        del norm.weight
        norm.weight = weight
    seen = []
    projections = {"_get_qkv_projections": lambda *_: (q.flatten(2), k.flatten(2), k.flatten(2))}
    stop = {"dispatch_attention_fn": lambda q, k, v, **_: seen.append((q, k)) or v}
    tables = (t[None, :, None] for t in (cos, sin))
    with mock.patch.multiple(transformer_wan, **projections, **stop):
        attn(q.flatten(2), None, None, tuple(tables))
    return seen[0]


def is_per_pair(inputs: Inputs) -> bool:
    """Whether there are tables with one value per pair."""
    return inputs.get("cos") is not None and inputs["cos"].shape[-1] != inputs["q"].shape[3]


def modules_norm_rope(eps: float, use_real_unbind_dim: int, cos: Any, sin: Any, **parts: Any) -> Any:
    """FLUX's modules in its order; for tables per pair Qwen-Image's function or, if a norm is over all heads, Wan's
    attention. None where no model has such tables.
    """
    q = parts["q"]
    weight = parts["q_weight"]
    per_pair = is_per_pair({"q": q, "cos": cos})
    if cos is not None and (cos.dim() == 3 or (per_pair and (use_real_unbind_dim == -2 or q.shape[3] % 8))):
        return None
    if per_pair and weight is not None and len(weight) != q.shape[3] and "q2" not in parts:
        tables = (t.repeat_interleave(2, -1) for t in (cos, sin))
        return wan_attention_inputs(q, parts["k"], [weight, parts["k_weight"]], *tables, eps)
    out = []
    for name in ("q", "k"):
        streams = []
        for n in ("", "2")[: 1 + ("q2" in parts)]:
            x = parts[f"{name}{n}"]
            weight = parts[f"{name}{n}_weight"]
            if weight is not None:
                norm = torch.nn.RMSNorm(len(weight), eps)
                del norm.weight
                norm.weight = weight
                x = norm(x.flatten(2)).view(x.shape) if len(weight) != x.shape[3] else norm(x)
            streams.append(x)
        x = torch.cat(streams, 1)
        if per_pair:
            x = apply_rotary_emb_qwen(x, torch.complex(cos, sin), use_real=False)
        elif cos is not None:
            x = apply_rotary_emb(x, (cos, sin), use_real_unbind_dim=use_real_unbind_dim, sequence_dim=1)
        out.append(x)
    return tuple(out)


MODULES = {
    "layernorm_modulate": modules_modulate,
    "gated_residual": modules_residual,
    "qk_norm_rope": modules_norm_rope,
}


@pytest.mark.skipif(transformer_wan is None, reason="needs diffusers")
@each_mixture
def test_the_reference_is_diffusers_own(name, mixture):
    """Results and gradients have the bits of its modules; in bf16, Qwen-Image's and Wan's round gradients otherwise."""
    op = OPS[name]
    compared = 0
    with serve("torch"):
        for seed in range(40):
            inputs = op.draw(Draw(seed, *MIXTURES[mixture]))
            if MODULES[name](**inputs) is None:
                continue
            compared += 1
            upstream = gradients_of(op, inputs, seed)
            got, want = (values(call, op, inputs, upstream) for call in (op.call, MODULES[name]))
            count = 2 if mixture == "bf16" and is_per_pair(inputs) else len(want)
            assert all(torch.equal(a, b) for a, b in zip(got[:count], want[:count], strict=True)), seed
    assert compared >= 20


@pytest.mark.parametrize(
    "name, backend",
    [
        pytest.param(name, backend, marks=[pytest.mark.full] * (backend == "triton" and name != "gated_residual"))
        for name in OPS
        for backend in BACKENDS
    ],
)
def test_in_graphs(name, backend, monkeypatch):
    """opcheck of the custom ops, and one compiled graph with eager's bits, for whose inputs fake results are right."""
    torch.compiler.reset()
    op = OPS[name]
    for seed in range(3 if backend == "torch" else 1):
        inputs = op.draw(Draw(seed, F32, F32))
        with serve(backend):
            upstream = gradients_of(op, inputs, seed)
            with Recorder() as recorder, monkeypatch.context() as patch:
                patch.setattr(_backend, "is_compiling", lambda: True)  # eager calls take the ops, too
                want = values(op.call, op, inputs, upstream)
            assert {call.name().partition("::")[2] for call, _ in recorder.calls} == (
                {name, f"{name}_grad"} if backend == "triton" else set()
            )
            for call, arguments in recorder.calls:
                torch.library.opcheck(call, arguments)
            compiled = torch.compile(op.call, fullgraph=True, backend="aot_eager", dynamic=False)
            got = values(compiled, op, inputs, upstream)
        tolerance = (
            {} if backend == "torch" else {"rtol": 0, "atol": 0}
        )  # graphs of torch's ops may sum in another order
        torch.testing.assert_close(got, want, **tolerance)


@each_op
def test_only_inputs_are_kept(name):
    """For the backward, a kernel keeps no tensor that it made."""
    op = OPS[name]
    inputs = op.draw(Draw(4, BF16, BF16))
    given = {t.untyped_storage().data_ptr() for t in inputs.values() if isinstance(t, Tensor)}
    kept = []
    with serve("triton"), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        leaves = {n: inputs[n].detach().requires_grad_() for n in op.leaves if inputs.get(n) is not None}
        op.call(**{**inputs, **leaves})
    assert kept and {t.untyped_storage().data_ptr() for t in kept} <= given


WANTED = {
    "gated_residual": [(), ("y",), ("gate",), ("y", "gate")],
    "qk_norm_rope": [(), ("q",), ("k",), ("q", "k"), ("q_weight", "k_weight")],
}
"""Op → inputs with a gradient, beside none."""


@pytest.mark.parametrize(("name", "wanted"), [(n, w) for n, many in WANTED.items() for w in many], ids=str)
def test_a_gradient_that_nobody_asks_for_is_not_computed(name, wanted, monkeypatch):
    """Those asked for are right; of the others the kernel gets no tensor, and without any it is not launched.

    (The gradient of a norm's weight comes with that of its queries and keys.)
    """
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 1, 3, 2, 16, generator=g).to(DEVICE)
    weight = torch.rand(16, generator=g).to(DEVICE)
    inputs = {"q": x, "k": y, "q_weight": weight, "k_weight": 2 * weight, "cos": None, "sin": None}
    call = qk_norm_rope
    if name == "gated_residual":
        inputs = {"x": x.flatten(2), "y": y.flatten(2), "gate": y[:, 0].flatten(1)}
        call = gated_residual
    module = sys.modules[call.__module__]
    launch = module.launch
    launched = []
    monkeypatch.setattr(module, "launch", lambda *args: (launched.append(args), launch(*args)))

    def run(backend):
        held = {n: t if t is None else t.clone().requires_grad_(n in (*wanted, "x")) for n, t in inputs.items()}
        with serve(backend):
            result = outputs(call(**held))
        if not any(t.requires_grad for t in result):
            return []
        return torch.autograd.grad(
            sum(t.sin().sum() for t in result), [t for t in held.values() if t is not None and t.requires_grad]
        )

    for mine, plain in zip(run("triton"), run("torch"), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)
    made = [args for args in launched if args[1].endswith("_grad")]
    assert len(made) == bool(wanted)
    count = 2 if name == "gated_residual" else 4
    names = list(inputs)[1:] if name == "gated_residual" else list(inputs)
    for args in made:
        got = {n for n, t in zip(names, args[-count:], strict=False) if t is not None}
        assert got == ({"q", "k", *wanted} if "q_weight" in wanted else {*wanted})


@pytest.mark.parametrize("start", [0, 1, 8])
def test_rows_that_begin_off_16_bytes_are_copied(start):
    """Off them, Triton compiles other accesses, and with them another order of a row's sum."""
    t = torch.zeros(1000)[start : start + 96].view(2, 3, 16)
    heads = sys.modules[qk_norm_rope.__module__]._heads
    for found in (unit_stride(t), heads(t), aligned(t)):
        assert torch.equal(found, t) and found.stride() == t.stride()
        assert found.data_ptr() % 16 == 0 and (found.data_ptr() == t.data_ptr()) == (start != 1)


@pytest.mark.skipif(not INTERPRETED, reason="launches for another vendor's GPU")
@pytest.mark.parametrize("hip", [None, "6.3"])
def test_options_of_one_vendor_are_not_passed_to_another(hip, monkeypatch):
    """Triton for AMD refuses a number of registers."""
    module = importlib.import_module("prefgrpo.kernels.layernorm_modulate")
    given = []
    monkeypatch.setattr(module, "launch_grad", lambda *args, **options: given.append(options))
    monkeypatch.setattr(torch.version, "hip", hip)
    x = torch.zeros(1, 2, 16)
    vector = torch.zeros(1, 16)
    module.layernorm_modulate_grad(x, vector, x, 1e-6, x, vector, None)
    module.layernorm_modulate_grad(x, vector, x, 1e-6, x, None, None)
    assert ["maxnreg" in options for options in given] == [hip is None, False]


def test_a_gpu_without_triton_uses_torch(monkeypatch):
    """And one with the kernels in C++ uses Triton for these ops."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(_backend, "_select", lambda *_: "cuda")
    _backend._beside_cuda.cache_clear()
    assert _backend.triton_or_torch(cuda, BF16) == "triton" and _backend.triton_or_torch(cuda, F64) == "torch"
    monkeypatch.setattr(_backend, "unavailable_reason", lambda name: f"{name} is not installed")
    _backend._beside_cuda.cache_clear()
    with pytest.warns(UserWarning, match="triton is not installed"):
        assert _backend.triton_or_torch(cuda, BF16) == "torch"
    _backend._beside_cuda.cache_clear()

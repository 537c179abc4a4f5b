"""The table of ops: arguments, results, gradient, each with a torch.library custom op of the same name.

Eager calls on plain tensors go straight to the backend's function (the dispatcher costs more than the small ops).
Whatever is more than that goes through the dispatcher as one opaque op, torch.ops.prefgrpo.<name>, with a fake kernel
and a registered gradient: compiled graphs, tracers, modes, tensor subclasses, functorch, lazily negated views.
Invariant: an absent optional result is None, and inside the custom op alone an empty tensor of bools.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from prefgrpo.ops import args
from prefgrpo.ops.args import Results
from prefgrpo.ops.backend import implementation, serving

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
# There are no public names for these: how many dispatch modes, whether a function mode, which tracer and transform.
_dispatch_modes, _function_mode = torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled
_tracer, _functorch = torch._C._get_tracing_state, torch._C._functorch


class Op:
    """One op. Called with its arguments, it returns its results; no gradient.

    name: of the function in every backend and of the custom op. kind: the NamedTuple of its arguments, of which the
    custom op takes the first `takes`. results: makes the `count` tensors that a backend writes. fp64: the fields that
    leave the op to torch where they are fp64.
    """

    def __init__(
        self,
        name: str,
        kind: Any,
        results: Callable[[Any], Results],
        count: int,
        *,
        fp64: str = "",
        takes: int | None = None,
    ) -> None:
        fields, hints = kind._fields[:takes], get_type_hints(kind)
        self.name, self._kind, self._takes = name, kind, len(fields)
        exact = [k for k, field in enumerate(fields) if field in fp64.split()]
        self.tensors = [k for k, field in enumerate(fields) if hints[field] in (Tensor, Tensor | None)]
        self._first, self._each = self.tensors[0], itemgetter(*self.tensors)
        self._exact = [k for k in exact if k in self.tensors]
        self._exact_dtypes = [k for k in exact if k not in self.tensors]

        def whole(out: Results) -> Any:
            each = [torch.empty(0, dtype=torch.bool, device=out[0].device) if t is None else t for t in out]
            return tuple(each) if count > 1 else each[0]

        def run(*given: Any) -> Any:
            return whole(self.eager(kind(*given)))

        kinds = [inspect.Parameter(f, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=hints[f]) for f in fields]
        gives: Any = tuple[(Tensor,) * count] if count > 1 else Tensor  # type: ignore[misc]
        run.__signature__ = inspect.Signature(kinds, return_annotation=gives)  # type: ignore[attr-defined]
        self._custom = torch.library.custom_op(f"prefgrpo::{name}", run, mutates_args=())
        self._custom.register_fake(lambda *given: whole(results(kind(*given))))
        self._graph = getattr(torch.ops.prefgrpo, name).default

    def __call__(self, a: Any) -> Results:
        """The results for these arguments."""
        if torch.compiler.is_compiling() or self.observed(a):
            with torch.no_grad():
                return self.in_graph(a)
        return self.eager(a)

    def of(self, a: Any, impl: ModuleType) -> Results:
        """The results by this backend, unless the dispatcher must see the call."""
        return self.in_graph(a) if self.observed(a) else getattr(impl, self.name)(a)

    def observed(self, a: Any) -> bool:
        """Whether the dispatcher must see this call: the memory of these tensors is not all there is to them."""
        for t in self._each(a):
            if t is not None and (type(t) not in _PLAIN or t.is_neg()):
                return True
        if _dispatch_modes() or _function_mode() or _tracer() is not None:
            return True
        return _functorch.maybe_current_level() is not None

    def eager(self, a: Any) -> Results:
        """Straight to the backend."""
        return getattr(self.backend(a), self.name)(a)

    def backend(self, a: Any) -> ModuleType:
        """The backend for these arguments."""
        for k in self._exact:
            if (t := a[k]) is not None and t.dtype == torch.float64:
                return implementation("torch")
        for k in self._exact_dtypes:
            if a[k] == torch.float64:
                return implementation("torch")
        return serving(a[self._first].device)

    def in_graph(self, a: Any) -> Results:
        """Through the custom op."""
        out = self._graph(*a[: self._takes])
        return [None if t.dtype == torch.bool else t for t in ((out,) if isinstance(out, Tensor) else out)]


class GradOp(Op):
    """An op with a gradient, as an autograd.Function and registered with the custom op.

    to: the fields that it flows to; another one that requires a gradient is refused. of: how many of the results it
    comes from. save(ctx, arguments, results) keeps what backward(ctx, upstream, affine_grad) needs, which returns the
    gradients of `to`.
    """

    def __init__(
        self, *op: Any, to: str, of: int, save: Callable[..., None], backward: Callable[..., Results], **more: Any
    ) -> None:
        super().__init__(*op, **more)
        self._to = [self._kind._fields.index(field) for field in to.split()]
        self._of = of

        def spread(grads: Results) -> tuple[Tensor | None, ...]:
            full: Results = [None] * self._takes
            for k, grad in zip(self._to, grads, strict=True):
                full[k] = grad
            return tuple(full)

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
                ctx.set_materialize_grads(False)
                a = self._kind(*given)
                ctx.impl = self.backend(a)
                out = getattr(ctx.impl, self.name)(a)
                ctx.mark_non_differentiable(*(t for t in out[of:] if t is not None))
                save(ctx, given, out)
                return tuple(out)

            @staticmethod
            def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
                if torch.is_grad_enabled():
                    raise RuntimeError(
                        f"{self.name} cannot be differentiated twice; run its backward without create_graph=True"
                    )
                return spread(backward(ctx, upstream, lambda r: affine_grad.of(r, ctx.impl)))

        self._function = Eager
        self._custom.register_autograd(
            lambda ctx, *upstream: spread(backward(ctx, upstream, affine_grad.in_graph)),
            setup_context=lambda ctx, inputs, output: save(ctx, inputs, output),
        )

    def __call__(self, a: Any) -> Results:
        """The results for these arguments, with the gradient. Raises ValueError for a gradient that it has not."""
        wanted = torch.is_grad_enabled() and [k for k in self.tensors if (t := a[k]) is not None and t.requires_grad]
        if wanted and (other := [self._kind._fields[k] for k in wanted if k not in self._to]):
            allowed = ", ".join(self._kind._fields[k] for k in self._to)
            raise ValueError(f"{self.name}: its gradient flows to {allowed} alone; detach {', '.join(other)}")
        if not torch.compiler.is_compiling():
            observed = self.observed(a)
            if observed or forward_ad._current_level >= 0:
                self._refuse_transforms(a, bool(wanted))
            if not observed:
                return self._function.apply(*a[: self._takes]) if wanted else self.eager(a)
        return [t if t is None or k < self._of else t.detach() for k, t in enumerate(self.in_graph(a))]

    def _refuse_transforms(self, a: Any, wanted: bool) -> None:
        """Raise NotImplementedError for derivatives that would be lost: forward mode, and torch.func.grad."""
        kinds, transform = {i.key() for i in _functorch.get_interpreter_stack() or ()}, _functorch.TransformType
        forward = transform.Jvp in kinds or any(
            t is not None and forward_ad.unpack_dual(t).tangent is not None for t in self._each(a)
        )
        if forward or (wanted and transform.Grad in kinds):
            raise NotImplementedError(
                f"{self.name} supports autograd's backward only; it was called under jvp or torch.func.grad"
            )


def _logp_save(ctx: Any, given: Sequence[Any], _: Any) -> None:
    """Tensors of inference mode, which autograd cannot watch and hence will not save, are kept as they are."""
    ctx.pair, tensors = given[6:9], [*given[:6], *given[9:]]
    ctx.fixed = {k: t for k, t in enumerate(tensors) if t is not None and t.is_inference()}
    for k in ctx.fixed:
        tensors[k] = None
    ctx.save_for_backward(*tensors)


def _logp_backward(ctx: Any, upstream: Sequence[Tensor | None], grad: Callable[[args.Replay], Results]) -> Results:
    *head, v_ref, v_old = (ctx.fixed.get(k, t) for k, t in enumerate(ctx.saved_tensors))
    wanted = (True, v_ref is not None, v_old is not None)
    given = [g if want else None for g, want in zip(upstream, wanted, strict=True)]
    return (
        grad(args.Replay._make((*head, *ctx.pair, v_ref, v_old, *given)))
        if any(g is not None for g in given)
        else [None] * 2
    )


def _policy_save(ctx: Any, given: Sequence[Any], out: Sequence[Any]) -> None:
    ctx.has_kl, ctx.has_ratio = given[8] is not None, given[10] is not None
    ctx.save_for_backward(*out[2:])


def _policy_backward(ctx: Any, upstream: Sequence[Any], _: Any) -> Results:
    """The gradient is known when the loss is; backward scales it."""
    d_delta, d_kl = ctx.saved_tensors
    delta, kl = d_delta * upstream[0], d_kl * upstream[0] if ctx.has_kl else None
    return [None, kl, delta] if ctx.has_ratio else [delta, kl, None]


_REPLAY = "x v x_next uncond v_ref v_old"
philox_normal = Op("philox_normal", args.Normal, args.Normal.results, 1, fp64="dtype")
affine_step = Op("affine_step", args.Step, args.Step.results, 5, fp64="x v uncond eps out_dtype copy_dtype")
affine_grad = Op("affine_grad", args.Replay, args.Replay.gradients, 2, fp64=_REPLAY)
affine_logp = GradOp(
    "affine_logp",
    args.Replay,
    args.Replay.results,
    3,
    fp64=_REPLAY,
    takes=11,
    to="v uncond",
    of=3,
    save=_logp_save,
    backward=_logp_backward,
)
policy_loss = GradOp(
    "policy_loss",
    args.Policy,
    args.Policy.results,
    4,
    fp64="logp logp_old kl log_ratio",
    to="logp kl log_ratio",
    of=1,
    save=_policy_save,
    backward=_policy_backward,
)
group_advantage = Op("group_advantage", args.Group, args.Group.results, 1)
winrate_advantage = Op("winrate_advantage", args.Winrate, args.Winrate.results, 2)

"""The ops: each is a function of checked arguments that picks the best backend, and a torch.library custom op.

Eager calls on plain tensors go straight to the backend's function of the same name (the dispatcher costs more than the
small ops). All other calls (compiled graphs, tracers, modes, tensor subclasses, functorch, lazily negated views) go
through the dispatcher as one opaque op, torch.ops.prefgrpo.<name>, with a fake kernel and a registered gradient.
Invariant: an absent optional result is None; only inside the custom op it is an empty bool tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from prefgrpo.ops.args import Normal, Policy, Replay, Results, Step, Winrate
from prefgrpo.ops.backend import backend_of, implementation, module_for

NAMESPACE = __name__.split(".")[0]
"""Namespace of the custom ops: prefgrpo, or the name that the hub's loader gives the package."""
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
# No public API for these: number of dispatch modes, whether a function mode is on, the tracer, functorch transforms.
_dispatch_modes, _function_mode = torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled
_tracer, _functorch = torch._C._get_tracing_state, torch._C._functorch
Grads = dict[str, Tensor | None]


class Op:
    """An op without a gradient; calling it with its arguments returns its results.

    schema: of the custom op, whose arguments are the first fields of `args_type`. dtyped: fields whose dtypes
    `backend_of` looks at. results: allocates the tensors that a backend writes (default:
    `args_type.results`).
    """

    has_gradient = False

    def __init__(self, args_type: Any, schema: str, dtyped: str = "", results: Any = None) -> None:
        self.name, _, signature = schema.partition("(")
        self.args_type, results = args_type, results or args_type.results
        self._custom = torch.library.custom_op(
            f"{NAMESPACE}::{self.name}", self.run, mutates_args=(), schema="(" + signature
        )
        self._custom.register_fake(lambda *args: _none_to_empty(results(args_type(*args))))
        self._overload = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        arguments = self._overload._schema.arguments
        self.fields = args_type._fields[: len(arguments)]
        self.tensors = [k for k, a in enumerate(arguments) if "Tensor" in str(a.type)]
        self._get_tensors = itemgetter(*self.tensors)
        self._get_dtyped = attrgetter(*dtyped.split()) if dtyped else None

    def run(self, *args: Any) -> Any:
        """Implementation of the custom op."""
        return _none_to_empty(self.eager(self.args_type(*args)))

    def __call__(self, a: Any) -> Results:
        """The results for these arguments."""
        if self.runs_directly(a):
            return self.eager(a)
        with torch.no_grad():
            return self.call_custom_op(a)

    def runs_directly(self, a: Any, requires_grad: bool = False) -> bool:
        """Whether to call the backend without the dispatcher. Raises NotImplementedError as `check_transforms`."""
        if torch.compiler.is_compiling():
            return False
        dispatched = self.needs_dispatcher(a)
        if dispatched or forward_ad._current_level >= 0:
            self.check_transforms(a, requires_grad)
        return not dispatched

    def needs_dispatcher(self, a: Any) -> bool:
        """Whether this call must go through the dispatcher: something intercepts it, or a tensor is not plain."""
        for t in self._get_tensors(a):
            if t is not None and (type(t) not in _PLAIN or t.is_neg()):
                return True
        if _dispatch_modes() or _function_mode() or _tracer() is not None:
            return True
        return _functorch.maybe_current_level() is not None

    def check_transforms(self, a: Any, requires_grad: bool = False) -> None:
        """Raise NotImplementedError if a derivative would be lost: forward mode, torch.func.grad if `requires_grad`."""
        kinds, transform = {i.key() for i in _functorch.get_interpreter_stack() or ()}, _functorch.TransformType
        forward = self.has_gradient and transform.Jvp in kinds  # an inner transform may hide the tangents
        forward |= any(forward_ad.unpack_dual(t).tangent is not None for t in self._get_tensors(a) if t is not None)
        if forward or (requires_grad and transform.Grad in kinds):
            how = "forward mode (jvp)" if forward else "torch.func.grad"
            has = "supports autograd's backward only" if self.has_gradient else "has no derivative"
            raise NotImplementedError(f"{self.name} {has}; it was called under {how}: detach its inputs")

    def eager(self, a: Any) -> Results:
        """Call the backend directly."""
        return getattr(self.backend(a), self.name)(a)

    def backend(self, a: Any) -> ModuleType:
        """The backend for these arguments."""
        dtypes = () if self._get_dtyped is None else {getattr(t, "dtype", t) for t in self._get_dtyped(a)}
        device = self._get_tensors(a)[0].device
        if torch.float64 in dtypes or torch.float16 in dtypes:
            return implementation(backend_of(device, *dtypes))
        return module_for(device)

    def call_custom_op(self, a: Any) -> Results:
        """Call the custom op."""
        out = self._overload(*a[: len(self.fields)])
        return [None if t.dtype == torch.bool else t for t in ((out,) if isinstance(out, Tensor) else out)]


def _none_to_empty(out: Results) -> Any:
    """Results in the form of the schema: None becomes an empty bool tensor."""
    each = [torch.empty(0, dtype=torch.bool, device=out[0].device) if t is None else t for t in out]
    return tuple(each) if len(each) > 1 else each[0]


class GradOp(Op):
    """An op with a gradient: an autograd.Function in eager mode, and a gradient registered with the custom op.

    grad_inputs: the differentiable fields; any other field that requires a gradient is rejected. num_grad_outputs: this
    many results, the first, are differentiable. save(ctx, arguments, results) keeps what
    backward(ctx, upstream, affine_grad) needs.
    """

    has_gradient = True

    def __init__(
        self,
        *op: Any,
        grad_inputs: tuple[str, ...],
        num_grad_outputs: int,
        save: Callable[[Any, Any, Sequence[Any]], None],
        backward: Callable[[Any, Sequence[Any], Callable[[Replay], Results]], Grads],
    ) -> None:
        super().__init__(*op)
        self._grad_inputs, self._num_grad_outputs = grad_inputs, num_grad_outputs

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> tuple[Tensor | None, ...]:
                ctx.set_materialize_grads(False)
                a = self.args_type(*args)
                ctx.backend = self.backend(a)
                out = getattr(ctx.backend, self.name)(a)
                ctx.mark_non_differentiable(*(t for t in out[num_grad_outputs:] if t is not None))
                save(ctx, a, out)
                return tuple(out)

            @staticmethod
            def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
                if torch.is_grad_enabled():
                    raise RuntimeError(
                        f"{self.name} cannot be differentiated twice; run its backward without create_graph=True"
                    )
                return self._by_field(backward(ctx, upstream, lambda a: _affine_grad(a, ctx.backend)))

        self._function = Eager
        self._custom.register_autograd(
            lambda ctx, *upstream: self._by_field(backward(ctx, upstream, affine_grad.call_custom_op)),
            setup_context=lambda ctx, inputs, output: save(ctx, self.args_type(*inputs), output),
        )

    def _by_field(self, grads: Grads) -> tuple[Tensor | None, ...]:
        return tuple(grads.get(field) for field in self.fields)

    def __call__(self, a: Any) -> Results:
        """The results, with autograd. Raises ValueError if a field without a gradient requires one."""
        requires_grad = torch.is_grad_enabled() and [
            self.fields[k] for k in self.tensors if (t := a[k]) is not None and t.requires_grad
        ]
        if requires_grad and (other := [field for field in requires_grad if field not in self._grad_inputs]):
            allowed = ", ".join(self._grad_inputs)
            raise ValueError(f"{self.name}: gradients flow only to {allowed}; detach {', '.join(other)}")
        if self.runs_directly(a, bool(requires_grad)):
            return self._function.apply(*a[: len(self.fields)]) if requires_grad else self.eager(a)
        return [
            t if t is None or k < self._num_grad_outputs else t.detach() for k, t in enumerate(self.call_custom_op(a))
        ]


def _affine_grad(a: Replay, backend: ModuleType) -> Results:
    """Use the backend of the forward, unless the call must go through the dispatcher."""
    return affine_grad.call_custom_op(a) if affine_grad.needs_dispatcher(a) else backend.affine_grad(a)


def _save_replay(ctx: Any, a: Replay, _: Any) -> None:
    """Inference-mode tensors, which autograd cannot track and refuses to save, are kept as plain references."""
    tensors = (a.x, a.v, a.x_next, a.coef, a.row, a.uncond, a.v_ref, a.v_old)
    ctx.guidance = a.scale, a.from_cond, a.rescale
    ctx.inference = [t if t is not None and t.is_inference() else None for t in tensors]
    ctx.save_for_backward(*(t if kept is None else None for t, kept in zip(tensors, ctx.inference, strict=True)))


def _replay_backward(ctx: Any, upstream: Sequence[Tensor | None], grad: Callable[[Replay], Results]) -> Grads:
    saved = (t if kept is None else kept for t, kept in zip(ctx.saved_tensors, ctx.inference, strict=True))
    x, v, x_next, coef, row, uncond, v_ref, v_old = saved
    g_logp, g_kl, g_guard = upstream
    g_kl, g_guard = None if v_ref is None else g_kl, None if v_old is None else g_guard
    if g_logp is None and g_kl is None and g_guard is None:
        return {}
    scale, from_cond, rescale = ctx.guidance
    dv, du = grad(
        Replay(x, v, x_next, coef, row, uncond, scale, from_cond, rescale, v_ref, v_old, g_logp, g_kl, g_guard)
    )
    return {"v": dv, "uncond": du}


def _save_policy(ctx: Any, a: Policy, results: Sequence[Any]) -> None:
    """The gradient is computed together with the loss; backward only scales it."""
    _, _, d_delta, d_kl = results
    ctx.delta_field, ctx.has_kl = "logp" if a.log_ratio is None else "log_ratio", a.kl is not None
    ctx.save_for_backward(d_delta, d_kl)


def _policy_backward(ctx: Any, upstream: Sequence[Any], _: Any) -> Grads:
    d_delta, d_kl = ctx.saved_tensors
    return {ctx.delta_field: d_delta * upstream[0], "kl": d_kl * upstream[0] if ctx.has_kl else None}


_AFFINE = "Tensor? row, Tensor? uncond, float scale, bool from_cond, bool rescale"
_REPLAY = f"Tensor x, Tensor v, Tensor x_next, Tensor coef, {_AFFINE}, Tensor? v_ref, Tensor? v_old"
_REPLAY_DTYPED = "x v x_next uncond v_ref v_old"

philox_normal = Op(
    Normal,
    "philox_normal(SymInt seed, Tensor sample, Tensor step, SymInt numel, SymInt offset, ScalarType dtype) -> Tensor",
    "dtype sample",
)
affine_step = Op(
    Step,
    f"affine_step(Tensor x, Tensor v, Tensor coef, {_AFFINE}, Tensor? eps, SymInt seed, Tensor? sample, Tensor? step, "
    "SymInt offset, ScalarType out_dtype, bool want_mean) -> (Tensor, Tensor, Tensor)",
    "x v uncond eps out_dtype",
)
affine_grad = Op(
    Replay,
    f"affine_grad({_REPLAY}, Tensor? g_logp, Tensor? g_kl, Tensor? g_guard) -> (Tensor, Tensor)",
    _REPLAY_DTYPED,
    Replay.gradients,
)
affine_logp = GradOp(
    Replay,
    f"affine_logp({_REPLAY}) -> (Tensor, Tensor, Tensor)",
    _REPLAY_DTYPED,
    grad_inputs=("v", "uncond"),
    num_grad_outputs=3,
    save=_save_replay,
    backward=_replay_backward,
)
policy_loss = GradOp(
    Policy,
    "policy_loss(Tensor logp, Tensor logp_old, Tensor advantage, float clip_low, float clip_high, float adv_clip, "
    "Tensor? weight, Tensor? kl, float kl_coef, Tensor? log_ratio, float? denominator) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "logp logp_old kl log_ratio",
    grad_inputs=("logp", "kl", "log_ratio"),
    num_grad_outputs=1,
    save=_save_policy,
    backward=_policy_backward,
)
winrate_advantage = Op(
    Winrate, "winrate_advantage(Tensor wins, Tensor counts, bool use_std, float eps, SymInt ddof) -> (Tensor, Tensor)"
)

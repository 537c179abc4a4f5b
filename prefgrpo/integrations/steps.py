"""Code shared by the drop-in step functions: coefficient rows, look-up of timesteps, and a single transition.

    x' = μ + s·ε,  μ = a·x + b·v          logp = w · mean_D (x' − μ)² + c

Rows are computed in fp64 on the latents' device; once per schedule, if η is a number. Invariant: no call waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from prefgrpo.ops import PhiloxNoise, sde_logp, sde_step
from prefgrpo.sde.rows import sde_rows


class Steps(NamedTuple):
    """n steps of a schedule; fp32 on the latents' device, computed in fp64 and rounded once."""

    coef: Tensor
    """Rows (a, b, s, w, c): [T, 5] of the whole schedule, or [n, 5] of these steps."""
    number: Tensor | None
    """int64 [n] numbers of these steps in the schedule; None if it has no such σ."""
    numbers: Tensor
    """[n, 5]: σ, s, s / √(σ − σ'), √(σ − σ'), σ' − σ."""
    is_table: bool = True
    """Whether the rows are the whole schedule's."""

    @property
    def sigma(self) -> Tensor:
        """[n], like the following properties."""
        return self.numbers.select(1, 0)

    @property
    def s(self) -> Tensor:
        """Standard deviation of x'."""
        return self.numbers.select(1, 1)

    @property
    def std_dev_t(self) -> Tensor:
        """s / √(σ − σ')."""
        return self.numbers.select(1, 2)

    @property
    def sqrt_dt(self) -> Tensor:
        """√(σ − σ')."""
        return self.numbers.select(1, 3)

    @property
    def delta(self) -> Tensor:
        """σ' − σ."""
        return self.numbers.select(1, 4)


_CACHE = WeakTensorKeyDictionary()
"""Values computed from a host codebase's `sigmas` or `timesteps`, valid while it leaves that tensor unchanged."""


def cached(source: Tensor, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What `make` returns, computed once per key and version of `source`."""
    version = 0 if source.is_inference() else source._version
    entries = _CACHE.setdefault(source, {})
    key = (version, *key)
    if key not in entries:
        with torch.inference_mode(False), torch.no_grad():  # for calls in other modes too
            entries[key] = make()
    return entries[key]


def _numbers(sigma: Tensor, sigma_next: Tensor, coef: Tensor) -> Tensor:
    """`Steps.numbers` of steps σ → σ' ([n] or [1]) with rows [n, 5], computed in fp64."""
    sigma, sigma_next, s = torch.broadcast_tensors(sigma.double(), sigma_next.double(), coef[:, 2].double())
    sqrt_dt = (sigma - sigma_next).sqrt()
    return torch.stack((sigma, s, s / sqrt_dt, sqrt_dt, sigma_next - sigma), 1).float()


def computed(
    rule: str,
    sigma: Tensor,
    sigma_next: Tensor,
    eta: float | Tensor,
    sigma_max: float | Tensor,
    sigma_min: float | Tensor = 0.0,
    *,
    index: Tensor | None = None,
    with_normalizer: bool = True,
) -> Steps:
    """Steps of any σ → σ' ([n] or [1]) and η (a number, or a tensor of one or n), which are not read on the host.

    index: their numbers in a schedule, if it has them. with_normalizer: False leaves c out of the log-prob. For `cps`,
    w = −1 also where s = 0, as in the peers.
    """
    eta = eta.detach().to(sigma.device).reshape(-1) if isinstance(eta, Tensor) else eta
    coef = sde_rows(rule, sigma, sigma_next, eta, sigma_max, sigma_min)
    if rule == "cps":
        coef[:, 3] = -1.0
    if not with_normalizer:
        coef[:, 4] = 0.0
    return Steps(coef, index, _numbers(sigma, sigma_next, coef), is_table=False)


def _table(sigmas: Tensor, device: torch.device, rule: str, eta: float, with_normalizer: bool) -> Steps:
    """All steps of a schedule."""
    sigmas = sigmas.to(device, non_blocking=True)
    ends = (sigmas[1], sigmas[-1])
    return computed(rule, sigmas[:-1], sigmas[1:], eta, *ends, with_normalizer=with_normalizer)


def scheduled(sigmas: Tensor, index: Tensor, rule: str, eta: float | Tensor, with_normalizer: bool = True) -> Steps:
    """The steps `index` int64 [n] of a schedule `sigmas` [T + 1].

    eta: a number, whose table is computed once per rule and device; or a tensor of one number, or of one per sample,
    which is not read on the host. with_normalizer: False leaves c out of the log-prob.
    """
    if not isinstance(eta, Tensor):
        key = (index.device, rule, eta, with_normalizer)
        table = cached(sigmas, key, lambda: _table(sigmas, *key))
        return Steps(table.coef, index, table.numbers.index_select(0, index))
    sigmas = sigmas.to(index.device)
    given = (sigmas[index], sigmas[index + 1], eta, sigmas[1], sigmas[-1])
    return computed(rule, *given, index=index, with_normalizer=with_normalizer)


def _first_choice(timesteps: Tensor, device: torch.device) -> Tensor:
    """The timesteps on the device, with NaN for the first of two equal ones, of which the second is to be found."""
    timesteps = timesteps.to(device, torch.float64, non_blocking=True)
    equal = timesteps[:, None] == timesteps
    is_chosen = equal.tril(-1).sum(1) == (equal.sum(1) - 1).clamp_max(1)
    return torch.where(is_chosen, timesteps, torch.nan)


def _by_timestep(timesteps: Tensor) -> dict[float, int]:
    """{timestep: step index} on the host."""
    chosen = _first_choice(timesteps, torch.device("cpu"))
    return {t: k for k, t in enumerate(chosen.tolist())}


def index_of(timesteps: Tensor, timestep: Any, device: torch.device) -> Tensor:
    """Step index int64 [n] of n timesteps (or of one number) in a scheduler's `timesteps` [T].

    Of equal timesteps the second one counts, as in diffusers. An unknown one raises RuntimeError, on a GPU
    asynchronously.
    """
    message = "timestep: not one of the scheduler's timesteps"
    if isinstance(timestep, Tensor) and timestep.device.type != "cpu":
        known = cached(timesteps, (device,), lambda: _first_choice(timesteps, device))
        found, index = (known == timestep.to(device).reshape(-1, 1)).max(1)
        torch._assert_async(found.all(), message)
        return index
    steps = cached(timesteps, ("host",), lambda: _by_timestep(timesteps))
    wanted = timestep.reshape(-1).tolist() if isinstance(timestep, Tensor) else [timestep]
    if unknown := [t for t in wanted if t not in steps]:
        raise RuntimeError(f"{message}: {unknown}")
    return torch.tensor([steps[t] for t in wanted]).to(device, non_blocking=True)


def noise_like(t: Tensor, generator: Any) -> Tensor | PhiloxNoise:
    """A PhiloxNoise as it is; otherwise ε like `t`, drawn with torch's generators as in diffusers."""
    if isinstance(generator, PhiloxNoise):
        return generator
    return randn_tensor(t.shape, generator, t.device, t.dtype)


def column(values: Tensor, ndim: int) -> Tensor:
    """`values` [n] as fp32 [n, 1, …] with `ndim` dimensions."""
    return values.float().view(-1, *([1] * (ndim - 1)))


class Result(NamedTuple):
    """Result of `transition`."""

    x_next: Tensor
    """[B, …]; a constant."""
    logp: Tensor
    """[B] fp32."""
    mean: Any
    """[B, …] fp32 μ; None if it was not asked for."""


def transition(
    x: Tensor,
    v: Tensor,
    steps: Steps,
    x_next: Tensor | None,
    noise: Tensor | PhiloxNoise | None,
    out_dtype: torch.dtype,
    want_mean: bool = True,
) -> Result:
    """One step: x' sampled with `noise` and rounded to `out_dtype`, or a stored x' scored.

    x, v: [B, …]. In grad mode μ and logp are differentiable in v.
    """
    batch = x.shape[0]
    number = None if steps.number is None else steps.number.expand(batch)
    coef = steps.coef if steps.is_table else steps.coef.expand(batch, 5)
    index = number if steps.is_table else None
    if isinstance(noise, PhiloxNoise) and noise.step is None:
        noise = noise._replace(step=number)
    if x_next is None:
        is_trained = torch.is_grad_enabled() and v.requires_grad
        step = sde_step(x, v, coef, index, noise=noise, out_dtype=out_dtype, want_mean=want_mean and not is_trained)
        if not is_trained:
            return Result(*step)
        x_next = step.x_next
    scored = sde_logp(x, v, x_next, coef, index, want_mean=want_mean)
    return Result(x_next, scored.logp, scored.mean)


def scheduler_step(
    scheduler: Any,
    rule: str,
    eta: float | Tensor,
    model_output: Tensor,
    timestep: Any,
    sample: Tensor,
    prev_sample: Tensor | None,
    generator: Any,
    out_dtype: torch.dtype | None,
    *,
    is_ode: bool = False,
    with_normalizer: bool = True,
    want_mean: bool = True,
) -> tuple[tuple[Tensor, Tensor, Any], Steps]:
    """(x', logp, μ) and the steps, at n timesteps of a scheduler (None: its own step index).

    prev_sample: score this x' instead of sampling. out_dtype: of x' (None: fp32). is_ode: score the ODE's step; its
    noise is drawn and discarded, as in Flow-GRPO. with_normalizer: False leaves c out of the log-prob. want_mean: False
    gives None for μ.
    """
    x = sample.float()
    v = model_output.float()
    if timestep is None:
        index = torch.full((1,), scheduler.step_index, dtype=torch.int64, device=x.device)
    else:
        index = index_of(scheduler.timesteps, timestep, x.device)
    steps = scheduled(scheduler.sigmas, index, rule, eta, with_normalizer)
    dtype = out_dtype or torch.float32
    noise = noise_like(v, generator) if prev_sample is None else None
    if is_ode:
        prev_sample = (x + column(steps.delta, x.dim()) * v.detach()).to(dtype)
    x_next, logp, mean = transition(x, v, steps, prev_sample, noise, dtype, want_mean)
    return (x_next.to(dtype), logp, mean), steps

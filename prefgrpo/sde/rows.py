"""Coefficient rows of steps whose σ are tensors on the device, in one launch and without reading them on the host.

The rules of `sde.rules` in fp64, rounded once. Invariant: a row equals, bit for bit, that of a schedule with the same
fp32 σ (on another device up to the last bit of an fp64 log or sin, which rounding to fp32 all but always hides).
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefgrpo.ops._backend import launch, op, triton_or_torch
from prefgrpo.ops._inputs import DTYPES
from prefgrpo.sde.rules import RULES, sde_row

_FUSED = ("flow", "wan", "dance", "cps", "cps_normalised", "ode")
"""Rules that are in kernels/sde_rows.py; others run in torch."""


# an input is a tensor [B], or None and a number
@op("sde_rows", mutates=("coef",))
def _rows(
    rule: str, sigma: Tensor, sigma_next: Tensor, eta: Tensor | None, sigma_max: Tensor | None,
    sigma_min: Tensor | None, eta_number: float, max_number: float, min_number: float, coef: Tensor,
) -> None:  # fmt: skip
    tensors = (sigma, sigma_next, eta, sigma_max, sigma_min)
    numbers = (eta_number, max_number, min_number)
    backend = triton_or_torch(coef.device) if rule in _FUSED else "torch"
    if backend != "torch":
        fields = {"rule": rule, "coef": coef, "tensors": tensors, "numbers": numbers}
        launch(backend, "sde_rows", coef, fields=fields)
        return
    double = [None if t is None else t.double() for t in tensors]
    given = [n if t is None else t for t, n in zip(double[2:], numbers, strict=True)]
    row = sde_row(rule, *double[:2], *given)
    for column, number in zip(coef.unbind(1), row, strict=True):
        column.copy_(number) if isinstance(number, Tensor) else column.fill_(number)


def _tensor(name: str, value: Tensor | float, device: torch.device) -> tuple[Tensor | None, float]:
    """(`value` as a tensor that the kernel reads, or None; else as a number)."""
    if not isinstance(value, Tensor):
        return None, float(value)
    if value.dtype not in DTYPES or value.dim() > 1 or value.device != device:
        got = f"{value.dtype} {list(value.shape)} on {value.device}"
        raise ValueError(f"{name}: expected fp32 or fp64 [B] or one number on {device}, got {got}")
    if value.requires_grad:
        raise ValueError(f"sde_rows: no gradient flows to {name}; detach it")
    return value if value.dtype in (torch.float32, torch.float64) else value.float(), 0.0


def sde_rows(
    rule: str,
    sigma: Tensor,
    sigma_next: Tensor,
    eta: Tensor | float = 0.0,
    sigma_max: Tensor | float | None = None,
    sigma_min: Tensor | float = 0.0,
) -> Tensor:
    """Rows (a, b, s, w, c), fp32 [B, 5], of the steps σ → σ' under a rule of `RULES`, on the device of `sigma`.

    sigma, sigma_next: fp32 or fp64 tensors (fp16 and bf16 are cast); eta, sigma_max, sigma_min: likewise, or numbers;
    all [B] or 0-d, which broadcast ([1, 5] if none is [B]). sigma_max, the second σ of the schedule, is needed by
    `wan`; the others read it where σ = 1 only, and it defaults to σ'. Values are not checked, because that would wait
    for the device: where σ' > σ, the rules with √(σ − σ') give NaN. Raises ValueError for an unknown rule, for tensors
    that do not fit, and for one that requires a gradient; TypeError if σ is no tensor (`sde_row` takes numbers).
    """
    if rule not in RULES:
        raise ValueError(f"unknown step rule '{rule}': expected one of {', '.join(RULES)}")
    if rule == "wan" and sigma_max is None:
        raise ValueError("the rule 'wan' needs sigma_max, the second σ of the schedule")
    for name, value in (("sigma", sigma), ("sigma_next", sigma_next)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {value!r}; sde.rules.sde_row takes numbers")
    device = sigma.device
    given = {"sigma": sigma, "sigma_next": sigma_next, "eta": eta}
    given |= {"sigma_max": sigma_next if sigma_max is None else sigma_max, "sigma_min": sigma_min}
    read = [_tensor(name, value, device) for name, value in given.items()]
    sizes = {t.shape[0] for t, _ in read if t is not None and t.dim()} or {1}
    batch = max(sizes) if 0 not in sizes else 0
    if not sizes <= {1, batch}:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, (t, _) in zip(given, read, strict=True) if t is not None)
        raise ValueError(f"sde_rows: expected tensors of one size [B], or 0-d, got {shapes}")
    tensors = [None if t is None else t.expand(batch) for t, _ in read]
    coef = torch.empty(batch, 5, dtype=torch.float32, device=device)
    _rows(rule, *tensors, *(number for _, number in read[2:]), coef)
    return coef

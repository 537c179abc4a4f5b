"""Affine ops with masks, a coefficient row per token or frame, packed samples of different lengths, or sums instead of
means.

    logp = Σ_elements (w·(x' − a·x − b·v)² + c) / divisor          KL and Guard log-ratio likewise

The kernels take samples of equal length with one coefficient row each. Here such a sample is a token (a run of elements
with the same row), and the tokens' results are added in fp64. Masked-out elements are set to 0 in all inputs, where
their residuals are 0. Invariant: a masked-out element affects only x', and its gradient is 0, whatever it holds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from prefgrpo.ops import library
from prefgrpo.ops.args import Normal, Replay, Results, Step, check_affine, check_ids, check_latents, check_step, copy_to


def _check_leading(name: str, t: Tensor, x: Tensor) -> None:
    """Raise ValueError unless `t` has the leading dimensions of `x`, or 1 in their place; a 1-d `t` must be [B]."""
    broadcast = 1 if t.dim() > 1 else x.shape[0]
    if not 0 < t.dim() <= x.dim() or any(n != m and n != broadcast for n, m in zip(t.shape, x.shape, strict=False)):
        raise ValueError(f"{name}: expected the leading dimensions of x, {list(x.shape)}, or 1s, got {list(t.shape)}")


class Tokens:
    """An affine op's arguments split into tokens; raises ValueError or TypeError if they do not fit together."""

    def __init__(self, a: Any, mask: Tensor | None, cu_seqlens: Tensor | None, divisor: float | Tensor | None) -> None:
        like = {"noise": a.eps} if isinstance(a, Step) else {"x_next": a.x_next, "v_ref": a.v_ref, "v_old": a.v_old}
        check_latents(a, **like)
        x, self.a, self.cu_seqlens = a.x, a, cu_seqlens
        self.row, self.batch = a.row, x.shape[0]
        if cu_seqlens is not None:
            self._assign_packed_rows(cu_seqlens)
        if self.row is None and a.coef.shape[0] == self.batch:
            self.row = torch.arange(self.batch, device=x.device)
        if self.row is None:
            raise ValueError(f"coef rows: expected [{self.batch}, 5], got {list(a.coef.shape)}; pass an index")
        if self.row.dim() > 1 and self.row.shape[0] == 1:
            self.row = self.row.expand(x.shape[0], *self.row.shape[1:])
        while self.row.dim() > 1 and self.row.shape[-1] == 1:
            self.row = self.row.squeeze(-1)
        _check_leading("index", self.row, x)
        self.token_dims = self.row.dim()
        self.row = self.row.expand(x.shape[: self.token_dims]).flatten()
        self.token_size = math.prod(x.shape[self.token_dims :])
        if a.rescale and self.token_dims == x.dim():
            raise ValueError("guidance.rescale: expected one row of coef for the whole last dimension, got several")
        self.mask = None if mask is None else self._checked_mask(mask)
        if isinstance(divisor, Tensor):
            if divisor.shape != (self.batch,) or divisor.device != x.device:
                raise ValueError(f"divisor: expected a number or [{self.batch}] on {x.device}, got {divisor.shape}")
        elif divisor is not None and not divisor > 0:
            raise ValueError(f"divisor: expected more than 0, got {divisor}")
        self.divisor = divisor
        coef = a.coef.detach()
        self.coef = torch.cat((coef[:, :4], torch.zeros_like(coef[:, :1])), 1)  # c is added by `_totals`

    def _assign_packed_rows(self, cu_seqlens: Tensor) -> None:
        """For packed samples: set the coefficient row of each token and the number of samples."""
        x = self.a.x
        integers = cu_seqlens.dtype in (torch.int32, torch.int64)
        if cu_seqlens.dim() != 1 or not cu_seqlens.numel() or not integers or cu_seqlens.device != x.device:
            raise ValueError(
                f"cu_seqlens: expected int32 or int64 [B + 1] on {x.device}, got {cu_seqlens.dtype} "
                f"{list(cu_seqlens.shape)} on {cu_seqlens.device}"
            )
        cu, tokens, self.batch = cu_seqlens.long(), x.shape[0], cu_seqlens.numel() - 1
        if self.row is None or self.row.shape == (self.batch,):
            segment = torch.searchsorted(cu, torch.arange(tokens, device=x.device), right=True) - 1
            segment = segment.clamp(0, max(self.batch - 1, 0))
            self.row = segment if self.row is None else self.row[segment]
        is_valid = (cu[0] == 0) & (cu[-1] == tokens) & (cu.diff() >= 0).all()
        self.row = torch.where(is_valid, self.row, -1)  # -1 is outside the table, which the kernels report
        self.cu_seqlens = cu.clamp(0, tokens).cummax(0).values

    def _checked_mask(self, mask: Tensor) -> Tensor:
        """`mask` with as many dimensions as x, each of x's size or 1."""
        x = self.a.x
        if mask.dtype != torch.bool or mask.device != x.device:
            raise TypeError(f"mask: expected torch.bool on {x.device}, got {mask.dtype} on {mask.device}")
        mask = mask.view(*mask.shape, *[1] * (x.dim() - mask.dim()))
        _check_leading("mask", mask, x)
        if self.a.rescale and mask.shape[-1] != 1:
            raise ValueError("mask: expected one value for the last dimension, whose norm guidance.rescale restores")
        return mask

    def _to_tokens(self, t: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, …] → [tokens, …]; 0 outside `mask`."""
        t = t if mask is None else t.masked_fill(~mask, 0.0)
        return t.flatten(0, self.token_dims - 1)

    def _counts(self) -> Tensor:
        """Number of unmasked elements of each token, fp64 [tokens]."""
        x = self.a.x
        if self.mask is None:
            return torch.full((self.row.shape[0],), float(self.token_size), dtype=torch.float64, device=x.device)
        inner = range(self.token_dims, x.dim())
        broadcast = math.prod([x.shape[d] for d in inner if self.mask.shape[d] == 1])
        counts = self.mask.double().sum(tuple(inner)) if inner else self.mask.double()
        return (counts * broadcast).expand(x.shape[: self.token_dims]).flatten()

    def _sum(self, t: Tensor) -> Tensor:
        """Sum over each sample's tokens: fp64 [tokens] → [B]."""
        x = self.a.x
        sums = t.view(x.shape[0], math.prod(x.shape[1 : self.token_dims])).sum(1)
        if self.cu_seqlens is None:
            return sums
        return torch.segment_reduce(sums, "sum", offsets=self.cu_seqlens, initial=0.0)

    def _totals(self, means: Results) -> Results:
        """fp32 [B] from the tokens' means over `token_size` elements: log-prob (without c), KL and Guard log-ratio."""
        counts, (logp, *others) = self._counts(), means
        c = self.a.coef[:, 4].double()
        in_table = (self.row >= 0) & (self.row < c.shape[0])
        c = torch.where(in_table, c[self.row.clamp(0, c.shape[0] - 1)], torch.nan)
        sums = [logp.double() * self.token_size + torch.where(counts > 0, c * counts, 0.0)]
        sums += [None if t is None else t.double() * self.token_size for t in others]
        divisor = self._sum(counts).clamp_min(1) if self.divisor is None else self.divisor
        return [None if t is None else (self._sum(t) / divisor).float() for t in sums]

    def logp(self) -> Results:
        """logp, KL and Guard log-ratio, [B] each."""
        a, mask = self.a, self.mask
        x, v, x_next = (self._to_tokens(t, mask) for t in (a.x, a.v, a.x_next))
        uncond, v_ref, v_old = (None if t is None else self._to_tokens(t, mask) for t in (a.uncond, a.v_ref, a.v_old))
        tokens = Replay(x, v, x_next, self.coef, self.row, uncond, a.scale, a.from_cond, a.rescale, v_ref, v_old)
        check_affine(tokens, x_next=x_next, v_ref=v_ref, v_old=v_old)
        return self._totals(library.affine_logp(tokens))

    def _draw_noise(self) -> Tensor:
        """The addressed noise, in the shape of x."""
        a = self.a
        if self.cu_seqlens is not None:
            raise ValueError("noise: expected a tensor with cu_seqlens, got an address; draw it with philox_normal")
        if a.step is None or a.step.dim() != 1:
            raise ValueError("noise.step: expected one step per sample where index has one per token, got none")
        check_ids("noise.sample", a.sample, self.batch, a.x.device)
        check_ids("noise.step", a.step, self.batch, a.x.device)
        normal = Normal(a.seed, a.sample, a.step, math.prod(a.x.shape[1:]), a.offset, torch.float32)
        return library.philox_normal(normal)[0].view(a.x.shape)

    def step(self) -> Results:
        """x', logp, mean, x0."""
        a, eps = self.a, self.a.eps
        one_token_per_sample = self.token_dims == 1 and self.cu_seqlens is None
        if a.sample is not None and not one_token_per_sample:
            eps, a = self._draw_noise(), a._replace(sample=None, step=None)
        fields = {"x": a.x, "v": a.v, "uncond": a.uncond, "eps": eps, "out": a.out}
        tokens = {name: None if t is None else self._to_tokens(t) for name, t in fields.items()}
        a = a._replace(**tokens, coef=self.coef, row=self.row)
        check_step(a)
        x_next, logp, *extra = library.affine_step(a)
        x_next = copy_to(x_next, a.out).view(self.a.x.shape)
        if self.mask is None:
            (logp,) = self._totals([logp])
        else:  # the launch scored masked-out elements too
            a = self.a
            pair = (a.uncond, a.scale, a.from_cond, a.rescale)
            replay = Replay(a.x, a.v, x_next, a.coef, a.row, *pair, None, None)
            with torch.no_grad():
                logp = Tokens(replay, self.mask, self.cu_seqlens, self.divisor).logp()[0]
        return [x_next, logp, *(None if t is None else t.view(self.a.x.shape) for t in extra)]

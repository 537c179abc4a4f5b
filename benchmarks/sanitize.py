"""`compute-sanitizer python -m benchmarks.sanitize`: every kernel once, at sizes that take each of its paths.

Aligned sizes use 128-bit accesses and several tiles per sample, odd ones scalar accesses and a partial last tile; KL
and GRPO-Guard read up to three velocities; 33 tokens are more than one partial sum. With PREFGRPO_BACKEND=triton the
same calls run Triton's kernels.
"""

from __future__ import annotations

import sys

import torch

from prefgrpo import ops
from prefgrpo.ops.low_rank_gelu import low_rank_gelu
from prefgrpo.ops.quantise_rows import dequantise_rows, quantise_rows

ROW = (0.9, -0.1, 0.5, -2.0, 0.3)
SIZES = ((3, 1003), (2, 65536))
"""(B, D): odd, and aligned over several tiles."""
F32 = torch.float32
BF16 = torch.bfloat16
DTYPES = ((F32, BF16, F32), (F32, BF16, BF16), (BF16, BF16, BF16), (F32, F32, F32), (F32, F32, BF16))
"""Dtypes of x, v and x'."""


def run(device: str) -> int:
    """Call every op with gradients; returns the number of calls."""
    calls = 0
    coef = torch.tensor([ROW], device=device)
    for batch, size in SIZES:
        index = torch.zeros(batch, dtype=torch.int64, device=device)
        ids = torch.arange(batch, device=device)
        for dtype, dtype_v, dtype_y in DTYPES:
            x = torch.randn(batch, size, device=device, dtype=dtype)
            v, v_ref, v_old = (torch.randn(batch, size, device=device, dtype=dtype_v) for _ in range(3))
            for noise in (None, torch.randn_like(x), ops.PhiloxNoise(7, ids, 3)):
                step = ops.sde_step(x, v, coef, index, noise=noise, out_dtype=dtype_y, want_mean=True)
            v.requires_grad_()
            plain = ops.sde_logp(x, v, step.x_next, coef, index)
            plain.logp.sum().backward()
            both = ops.sde_logp(x, v, step.x_next, coef, index, v_ref=v_ref, v_old=v_old)
            (both.logp + both.kl + both.log_ratio).sum().backward()
            advantage = torch.linspace(-1.0, 1.0, batch, device=device)
            again = ops.sde_logp(x, v, step.x_next, coef, index)
            out = ops.policy_loss(again.logp, step.logp, advantage, epsilon_low=1e-4)
            (out.loss + 0.0 * out.metrics.sum().detach()).backward()
            calls += 7
    for heads, dim in ((9, 128), (3, 22)):
        for dtype in (torch.bfloat16, torch.float32):
            calls += blocks(heads, dim, dtype, device)
    wins = torch.rand(2, 24, 24, device=device)
    ops.winrate_advantage(wins, torch.ones_like(wins))
    return calls + 1


def blocks(heads: int, dim: int, dtype: torch.dtype, device: str) -> int:
    """Call the ops of transformer blocks on slices of one projection, with all gradients; returns the calls."""
    channels = heads * dim
    q, k, y = torch.randn(1, 33, 3 * channels, device=device, dtype=dtype).requires_grad_().chunk(3, 2)
    shift, scale, gate = torch.randn(1, 3 * channels, device=device, dtype=dtype).requires_grad_().chunk(3, 1)
    out = [ops.layernorm_modulate(q, shift, scale), ops.gated_residual(q, y, gate)]
    for width, table in ((dim, dim), (channels, dim // 2)):
        weight = torch.ones(width, device=device, dtype=dtype, requires_grad=True)
        cos, sin = torch.randn(2, 33, table, device=device)
        for pairs in (-1, -2):
            split = [t.unflatten(2, (heads, dim)) for t in (q, k)]
            out += ops.qk_norm_rope(*split, weight, weight, cos, sin, use_real_unbind_dim=pairs)
    out += ops.qk_norm_rope(*split, None, None, cos, sin, groups=heads // 3)
    up = torch.ones(channels, 5, device=device, dtype=dtype, requires_grad=True)
    out += [low_rank_gelu(q[0], y[0, :, :5], up), low_rank_gelu(q[0], None, None)]
    sum(t.sum() for t in out).backward()
    dequantise_rows(*quantise_rows(q[0]), dtype)
    return 11


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{run(device)} calls on {device}, {ops.backend_of(device)} kernels")
    if device == "cuda":
        torch.cuda.synchronize()
    sys.exit(0)

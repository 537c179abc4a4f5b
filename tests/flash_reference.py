"""The flash-attention kernels that ring attention calls, for CPUs, from the formulas in fp64.

    S = q kᵀ · scale      lse = log Σ exp S      P = exp(S − lse)      out = P v
    dv = Pᵀ g             dS = P (g vᵀ − Σ g · out)                    dq = dS k · scale      dk = dSᵀ q · scale

The backward takes `out` and `lse` from its caller, as the kernels do: ring attention passes those of all keys together
with the keys of one process. Layouts, dtypes and signatures are torch's and FlashAttention-3's.
"""

from __future__ import annotations

import torch
from diffusers.models import attention_dispatch
from torch import Tensor

BACKENDS = ("_native_flash", "_flash_3_hub", "_flash_3_varlen_hub")
"""diffusers' backends whose kernels `register` puts in place."""
_registered: list[torch.library.Library] = []


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output in q's dtype and log-sum-exps [B, H, N] in fp32; q [B, H, N, D], k and v [B, H, M, D]."""
    scores = _scores(q, k, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.double()
    return out.to(q.dtype), lse.float()


def gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of dq, dk and dv that belong to the keys k."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    weights = (_scores(q, k, scale) - lse.double()[..., None]).exp()
    g = g.double()
    wide = [x.double() for x in (q, k, v)]
    inner = weights * (g @ wide[2].mT - (g * out.double()).sum(-1, keepdim=True)) * factor
    return (inner @ wide[1]).to(q.dtype), (inner.mT @ wide[0]).to(q.dtype), (weights.mT @ g).to(q.dtype)


def _scores(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    return q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)


def register() -> None:
    """Put these kernels in place in this process, torch's as those of CPUs."""
    if _registered:
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", _aten_forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", _aten_backward, "CPU")
    _registered.append(library)  # its end would remove them
    for name in ("_flash_3_hub", "_flash_3_varlen_hub"):
        config = attention_dispatch._HUB_KERNELS_REGISTRY[attention_dispatch.AttentionBackendName(name)]
        config.wrapped_forward_fn = _flash_3_forward
        config.wrapped_backward_fn = _flash_3_backward


# ---- torch: [B, H, N, D] --------------------------------------------------------------------------------------------


def _aten_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    assert (dropout_p, is_causal, return_debug_mask) == (0, False, False)
    out, lse = attend(query, key, value, scale)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # as the kernel writes it
    state = torch.empty(2, dtype=torch.uint64)
    none = (torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    return out, lse, *none, query.shape[2], key.shape[2], state, state[0].clone(), query.new_empty(0)


def _aten_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    assert (dropout_p, is_causal, max_q, max_k) == (0, False, query.shape[2], key.shape[2])
    assert logsumexp.shape == query.shape[:3] and logsumexp.dtype == torch.float32
    return gradients(grad_out, query, key, value, out, logsumexp, scale)


# ---- FlashAttention-3: [B, N, H, D], varlen [B · N, H, D] with lse [H, B · N] ----------------------------------------


def _split(x: Tensor, ends: Tensor | None) -> Tensor:
    """[B, H, N, D], from [B, N, H, D] or from samples of one length that are packed up to `ends` [B + 1]."""
    return (x if ends is None else x.unflatten(0, (len(ends) - 1, -1))).transpose(1, 2)


def _joined(x: Tensor, ends: Tensor | None) -> Tensor:
    x = x.transpose(1, 2)
    return (x if ends is None else x.flatten(0, 1)).contiguous()


def _forward(q, k, v, ends_q, ends_k, scale):
    out, lse = attend(_split(q, ends_q), _split(k, ends_k), _split(v, ends_k), scale)
    return _joined(out, ends_q), lse if ends_q is None else lse.transpose(0, 1).flatten(1).contiguous()


def _backward(g, q, k, v, out, lse, grads, ends_q, ends_k, scale):
    packed = ends_q is not None
    assert lse.shape == ((q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]))
    assert lse.is_contiguous() and lse.dtype == torch.float32
    if packed:
        lse = lse.unflatten(1, (len(ends_q) - 1, -1)).transpose(0, 1)
    inputs = (_split(g, ends_q), _split(q, ends_q), _split(k, ends_k), _split(v, ends_k), _split(out, ends_q))
    for to, of, ends in zip(grads, gradients(*inputs, lse, scale), (ends_q, ends_k, ends_k), strict=True):
        to.copy_(_joined(of, ends))


def _flash_3_forward(q, k, v, *others, causal, window_size_left, window_size_right, softcap, **_):
    assert (causal, window_size_left, window_size_right, softcap) == (False, -1, -1, 0)
    ends_q = others[4]
    ends_k = others[5]
    return _forward(q, k, v, ends_q, ends_k, scale=others[20])


def _flash_3_backward(g, q, k, v, out, lse, ends_q, ends_k, used_q, used_k, most_q, most_k, dq, dk, dv, *others):
    scale, causal, left, right, softcap, _, _ = others
    assert (used_q, used_k, causal, left, right, softcap) == (None, None, False, -1, -1, 0)
    _backward(g, q, k, v, out, lse, (dq, dk, dv), ends_q, ends_k, scale)

"""Stand-ins for attention kernels that need a GPU, registered in diffusers under the kernels' names.

Each refuses what its kernel refuses (dtypes, masks, wide heads, strides) and computes with torch, alone and under
context parallelism, forward and backward. So tests show what reaches a kernel, not that the kernel is right.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import get_args
from unittest import mock

import torch
from diffusers.models import attention_dispatch as dispatch

from prefgrpo.config.schema import Attention
from prefgrpo.models.attention import FLASH

VARLEN = ("_flash_3_varlen_hub",)
UNMASKED = ("_flash_3_hub", "_native_flash")
NAMES = [name for name in get_args(Attention) if name not in ("native", "_native_math", *FLASH)]
CALLS: Counter[str] = Counter()
"""Calls per backend, forward and backward apart (`name`, `name backward`)."""


def check(name, *tensors):
    """Raise what a kernel raises for tensors that it does not take."""
    dtypes = {t.dtype for t in tensors}
    if not dtypes <= {torch.bfloat16, torch.float16}:
        raise RuntimeError(f"{name} only supports fp16 and bf16 data types, got {dtypes}")
    if len(dtypes) > 1:
        raise RuntimeError(f"{name}: query, key and value must have the same dtype, got {dtypes}")
    if any(t.shape[-1] > 256 for t in tensors) or any(t.stride(-1) != 1 for t in tensors):
        raise RuntimeError(f"{name}: heads of at most 256 contiguous elements")
    CALLS[name] += 1


def key_mask(name, mask, batch, keys):
    """The mask as the kernel understands it, [B, 1, 1, N] or None."""
    if mask is None:
        return None
    if name in UNMASKED:
        raise ValueError(f"`attn_mask` is not supported for {name}")
    return dispatch._normalize_attn_mask(mask, batch, keys)[:, None, None, :] if name in VARLEN else mask


def attend(query, key, value, mask, scale):
    q, k, v = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.permute(0, 2, 1, 3)


def probabilities(query, key, mask, scale, lse=None):
    """(softmax [B, H, N, M], log-sum-exp [B, H, N]) in fp32, or with the log-sum-exp over more keys than these."""
    scores = torch.einsum("bnhd,bmhd->bhnm", query.float(), key.float()) * (scale or query.shape[-1] ** -0.5)
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse[..., None]).exp(), lse


def split_forward(name, ctx, query, key, value, attn_mask, _p, _causal, scale, _gqa, return_lse, _save_ctx=True, **_):
    """The forward of one process's heads or keys, with what the kernel's backward needs in `ctx`."""
    check(name, query, key, value)
    mask = key_mask(name, attn_mask, len(query), key.shape[1])
    p, lse = probabilities(query, key, mask, scale)
    out = torch.einsum("bhnm,bmhd->bnhd", p, value.float()).to(query.dtype)
    lse = lse.transpose(1, 2).contiguous()
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale = scale
        ctx.mask = mask
    return (out, lse) if return_lse else out


def split_backward(name, ctx, grad, *_, query=None, key=None, value=None, out=None, lse=None, **__):
    """Its backward, for the saved keys or others of the ring, with the log-sum-exp over all keys."""
    own = ctx.saved_tensors
    given = (query, key, value, out, lse)
    query, key, value, out, lse = (b if a is None else a for a, b in zip(given, own, strict=True))
    check(f"{name} backward", query, key, value, grad)
    scale = ctx.scale or query.shape[-1] ** -0.5
    p, _ = probabilities(query, key, ctx.mask, scale, lse.float().transpose(1, 2))
    g = grad.float()
    dv = torch.einsum("bhnm,bnhd->bmhd", p, g)
    dp = torch.einsum("bnhd,bmhd->bhnm", g, value.float())
    ds = p * (dp - (g * out.float()).sum(-1).transpose(1, 2)[..., None]) * scale
    dq = torch.einsum("bhnm,bmhd->bnhd", ds, key.float())
    dk = torch.einsum("bhnm,bnhd->bmhd", ds, query.float())
    return tuple(x.to(query.dtype) for x in (dq, dk, dv))


def kernel(name):
    def backend(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
        return_lse=False, _parallel_config=None,
    ):  # fmt: skip
        if _parallel_config is not None:
            return dispatch._templated_context_parallel_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
                forward_op=partial(split_forward, name), backward_op=partial(split_backward, name),
                _parallel_config=_parallel_config,
            )  # fmt: skip
        check(name, query, key, value)
        return attend(query, key, value, key_mask(name, attn_mask, len(query), key.shape[1]), scale)

    backend.leaves_kernels_allowed = True  # so that a run does not call torch's attention in its place
    return backend


@contextmanager
def stand_ins() -> Iterator[Counter[str]]:
    """Context in which the kernels exist; yields the calls so far."""
    registry = dispatch._AttentionBackendRegistry
    arguments = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "return_lse"}
    names = {dispatch.AttentionBackendName(name): name for name in NAMES}
    with (
        mock.patch.dict(registry._backends, {key: kernel(name) for key, name in names.items()}),
        mock.patch.dict(registry._supported_arg_names, {key: arguments | {"_parallel_config"} for key in names}),
        mock.patch.object(dispatch, "_check_attention_backend_requirements", lambda backend: None),
        mock.patch.object(dispatch, "_maybe_download_kernel_for_backend", lambda backend: None),
    ):
        CALLS.clear()
        yield CALLS

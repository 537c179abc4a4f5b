"""diffusers' caches in rollouts: a denoiser skips blocks whose output hardly changes from one step to the next.

Lossy: samples are no longer those of the policy, so only objectives without a ratio may be trained on them. Invariants:
a denoiser that is not inside `cached` computes everything, and no state outlives a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from prefgrpo.config.schema import ConfigError, SamplingConfig

ATTENTION = r"[a-z_]*blocks\.\d+\.attn\d*"
"""Names of the modules that taylorseer extrapolates; diffusers' own pattern matches none of Wan's or LTX's."""


def check(denoiser: object, sampling: SamplingConfig) -> None:
    """Raise ConfigError where `rollout.cache` is set and diffusers has no cache for the denoiser."""
    if sampling.cache != "none" and not hasattr(denoiser, "enable_cache"):
        kind = type(denoiser).__name__
        raise ConfigError([f"rollout.cache: diffusers has no cache for {kind}: expected none, got {sampling.cache}"])


@contextmanager
def cached(denoisers: Sequence[Any], sampling: SamplingConfig) -> Iterator[None]:
    """The denoisers use `rollout.cache` within; its state begins empty and is dropped at the end."""
    if sampling.cache == "none":
        yield
        return
    from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig

    config = (
        FirstBlockCacheConfig(threshold=sampling.cache_threshold)
        if sampling.cache == "first_block"
        else TaylorSeerCacheConfig(
            cache_interval=sampling.cache_interval,
            disable_cache_before_step=2,
            taylor_factors_dtype=torch.float32,
            cache_identifiers=[ATTENTION],
        )
    )
    try:
        for denoiser in denoisers:
            denoiser.enable_cache(config)
        yield
    finally:
        for denoiser in denoisers:
            denoiser.disable_cache()


def in_turn(predict: Callable[..., torch.Tensor], denoiser: Any) -> Callable[..., torch.Tensor]:
    """`predict`, each call of one step with a state of its own: the halves of a guidance pair differ."""
    turns = count()

    def call(*given: Any) -> torch.Tensor:
        with denoiser.cache_context(f"forward {next(turns)}"):
            return predict(*given)

    return call

"""diffusers' caches in rollouts: equality with stock pipelines that use the same cache, and refused combinations.

A cache that stays on in the training forwards, or whose state outlives a batch, would silently change gradients and
samples: so samples are compared before, inside and after the cached context.
"""

from dataclasses import replace

import pytest
import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig
from families import SIZES, case_of, draw, load, noise, stock_image
from tiny_run import settings

from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.models.cache import ATTENTION, cached, check
from prefgrpo.run.session import Clock, config_errors

STOCK = {
    "first_block": FirstBlockCacheConfig(threshold=50.0),  # large: both CFG halves always skip
    "taylorseer": TaylorSeerCacheConfig(
        cache_interval=2, disable_cache_before_step=2, taylor_factors_dtype=torch.float32, cache_identifiers=[ATTENTION]
    ),
}
OURS = {"first_block": {"cache": "first_block", "cache_threshold": 50.0}, "taylorseer": {"cache": "taylorseer"}}


@pytest.mark.parametrize("cache", STOCK)
@pytest.mark.parametrize("family", ["flux", "qwen_image", "wan"])
def test_samples_are_those_of_the_stock_pipeline_with_the_cache(family, cache):
    case, steps = case_of(family), 6
    adapter, pipe = load(case), load(case).pipe
    sampling = replace(case.sampling(SIZES[0], steps), **OURS[cache])
    plain = draw(adapter, case, SIZES[0], steps)
    with cached([adapter.transformer], sampling):
        ours = draw(adapter, case, SIZES[0], steps)
    assert torch.equal(draw(adapter, case, SIZES[0], steps), plain)
    pipe.transformer.enable_cache(STOCK[cache])
    theirs = stock_image(pipe, case, noise(adapter, sampling), SIZES[0], steps)
    assert float((ours - theirs).abs().max()) < 1e-5 < float((ours - plain).abs().max())


def test_a_run_skips_blocks_in_rollouts_alone(trainer):
    """Counts forwards of the first and of the last block in one AWM step, with and without the cache."""
    counts = {}
    for cache in ("none", "first_block"):
        rollout = {"steps": 8, "cache": cache, "cache_threshold": 50.0}
        loop = trainer(cache, rollout=rollout, train={"objective": "awm"}, eval={"every": 0})
        blocks = loop.adapter.transformer.transformer_blocks[0], loop.adapter.transformer.single_transformer_blocks[-1]
        seen = [[], []]
        for calls, block in zip(seen, blocks, strict=True):
            block.attn.register_forward_hook(lambda *_, calls=calls: calls.append(torch.is_grad_enabled()))
        loop.step(0, Clock())
        counts[cache] = [(len(calls) - sum(calls), sum(calls)) for calls in seen]
    (first, trains), (last, also) = counts["none"]
    assert (first, trains) == (last, also) and first > 8
    assert counts["first_block"] == [(first, trains), (first // 8, trains)]


REFUSED = {
    "rollout.cache: grpo needs log-probs": {},
    "rollout.cache: expected none with compile": {"train": {"objective": "awm"}, "compile": True},
    "or where parallel splits weights": {"train": {"objective": "awm"}, "parallel": {"shard": 2}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_needs_every_forward_is_refused(place, message):
    changes = {"rollout": {"cache": "taylorseer"}, "eval": {"every": 0}} | REFUSED[message]
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(config_errors(from_dict(settings(place, "refused", **changes))))


def test_a_family_without_a_cache_is_refused():
    case = case_of("sd3")
    with pytest.raises(ConfigError, match="diffusers has no cache for SD3Transformer2DModel"):
        check(load(case).transformer, replace(case.sampling(SIZES[0], 2), cache="taylorseer"))

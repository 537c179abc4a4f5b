"""The comparison of whole trainers (benchmarks/bench_peers_train.py), our side only: it needs no peer.
The peers' side is in test_integrations_trainers.py.
"""

import json

import pytest

from benchmarks import bench_peers_train
from benchmarks.bench_peers_train import SIZES, settings
from benchmarks.blocks import rendered
from benchmarks.peer_runs import PEERS
from prefgrpo.config.loading import from_dict, parse


@pytest.mark.parametrize("kind", bench_peers_train.KINDS)
@pytest.mark.parametrize("name", PEERS)
def test_our_side_does_the_same_work(tmp_path, name, kind):
    """As many samples, trained steps and updates as the peer; batches and gradients differ only where documented."""
    for work in SIZES.values():
        alone, published = name in bench_peers_train.ALONE, kind != "same"
        config = from_dict(settings(name, work, tmp_path, 3, kind))
        work = bench_peers_train.as_published(name, work) if published else work
        r, t = config.rollout, config.train
        assert (r.prompts_per_step, r.group_size, r.steps) == (work.prompts, work.group, work.steps)
        assert t.updates_per_rollout == work.updates and t.kl_coef == (work.kl if "flow_grpo" in name else 0.0)
        if not (name in bench_peers_train.RECIPES and published):
            assert r.window_high == r.window_size == 0, "trains all steps but the last"
            assert r.batch_size == (1 if alone else work.batch) and not t.gradient_checkpointing
        assert (t.guidance_gradient == "conditional") == (name == "flow_grpo_sd3" and published)
        assert (t.lora_rank == 0) == (name == "dance_grpo_flux")


@pytest.mark.parametrize("name", bench_peers_train.RECIPES)
def test_as_published_is_our_recipe(tmp_path, name):
    """The settings of rollout and memory are those of the recipe for the same method, scaled to fewer steps."""
    recipe, mistakes = parse(bench_peers_train.RECIPES[name])
    assert not mistakes
    for work in SIZES.values():
        ours = from_dict(settings(name, work, tmp_path, 3, "own"))
        keys = ["rule", "eta", "window_policy", "sde_everywhere", "sigmas", "shift", "truncate_timesteps"]
        if name in bench_peers_train.ALONE:
            for config in (recipe, ours):
                r = config.rollout
                assert r.window_high == r.steps - 1 and r.window_size == int(r.window_high * 0.6)
        else:
            keys += ["steps", "window_low", "window_high", "window_size"]
        for key in keys:
            assert getattr(ours.rollout, key) == getattr(recipe.rollout, key), key
        assert ours.data.max_length == recipe.data.max_length or name in bench_peers_train.ALONE
        assert ours.rollout.batch_size == min(recipe.rollout.batch_size, work.group)
        assert ours.train.gradient_checkpointing == recipe.train.gradient_checkpointing
        assert (ours.train.lora_rank == 0) == (recipe.train.lora_rank == 0)


def test_the_page_is_the_rendering_of_the_results():
    page, found = bench_peers_train.PAGE.read_text(), json.loads(bench_peers_train.JSON.read_text())
    assert found["runs"] and rendered(page, "peers_train", bench_peers_train.tables(found)) == page

"""The comparison of whole trainers (benchmarks/bench_peers_train.py), our side only: it needs no peer.
The peers' side is in test_integrations_trainers.py.
"""

import json

import pytest

from benchmarks import bench_peers_train
from benchmarks.bench_peers_train import SIZES, settings
from benchmarks.blocks import rendered
from benchmarks.peer_runs import PEERS
from prefgrpo.config.loading import from_dict


@pytest.mark.parametrize("kind", bench_peers_train.KINDS)
@pytest.mark.parametrize("name", PEERS)
def test_our_side_does_the_same_work(tmp_path, name, kind):
    """As many samples, trained steps and updates as the peer; batches and gradients differ only where documented."""
    for work in SIZES.values():
        config = from_dict(settings(name, work, tmp_path, 3, kind))
        r, t, published = config.rollout, config.train, kind != "same"
        assert (r.prompts_per_step, r.group_size, r.steps) == (work.prompts, work.group, work.steps)
        assert r.window_high == r.window_size == 0, "trains all steps but the last"
        assert t.updates_per_rollout == work.updates and t.kl_coef == (work.kl if "flow_grpo" in name else 0.0)
        alone = name in bench_peers_train.ALONE and not published
        assert r.batch_size == (1 if alone else work.batch)
        assert (t.guidance_gradient == "conditional") == (name == "flow_grpo_sd3" and published)
        assert (t.lora_rank == 0) == (name == "dance_grpo_flux")


def test_a_step_of_ours_is_timed():
    seconds = bench_peers_train.train("dance_grpo_flux", SIZES["tiny"], 2, "own")
    assert len(seconds) == 2 and min(seconds) > 0


def test_the_page_is_the_rendering_of_the_results():
    page, found = bench_peers_train.PAGE.read_text(), json.loads(bench_peers_train.JSON.read_text())
    assert found["runs"] and rendered(page, "peers_train", bench_peers_train.tables(found)) == page

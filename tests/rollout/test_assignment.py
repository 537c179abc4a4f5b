"""Which samples make a batch, and which process gets it: published group counts and small ones."""

from collections import Counter
from dataclasses import replace

import pytest

from prefgrpo.config.loading import from_dict
from prefgrpo.rollout.assignment import assign_batches, update_of
from prefgrpo.run.errors import batch_errors


def config(**over):
    return from_dict({"model": "m", "data": {"prompts": "p"}} | over)


@pytest.mark.parametrize(("prompts", "group", "updates", "slices", "sizes"), [
    (8, 8, 1, "prompts", [1, 2, 4, 8]), (8, 8, 2, "prompts", [1, 2, 4, 8]), (8, 8, 2, "members", [1, 2, 4]),
    (32, 9, 3, "members", [1, 3]), (8, 21, 2, "members", [1]), (1, 8, 2, "prompts", [1, 2, 4]),
    (2, 6, 3, "prompts", [1, 2]),
])  # fmt: skip
def test_a_batch_of_several_prompts_or_updates_is_a_mistake(prompts, group, updates, slices, sizes):
    for size in range(1, prompts * group + 1):
        rollout = {"prompts_per_step": prompts, "group_size": group, "batch_size": size}
        c = config(rollout=rollout, train={"updates_per_rollout": updates, "update_slices": slices})
        whole = all(len(b.places) == size for b in assign_batches(c))
        assert (batch_errors(c) == []) == whole == (size in sizes), size
    assert f"expected one of {sizes}, got {prompts * group}" in batch_errors(c)[0]


@pytest.mark.parametrize("slices", ["prompts", "members"])
@pytest.mark.parametrize(
    ("prompts", "group", "batch", "updates"), [(42, 24, 9, 2), (48, 12, 4, 3), (3, 4, 8, 1), (5, 6, 4, 5)]
)
def test_assignment(prompts, group, batch, updates, slices):
    """Published group counts and small ones: the batches are the same for any number of processes, and every process
    has its share of every update."""
    rollout = {"prompts_per_step": prompts, "group_size": group, "batch_size": batch}
    c = config(rollout=rollout, train={"updates_per_rollout": updates, "update_slices": slices})
    one = assign_batches(c)
    assert sorted(p for b in one for p in b.places) == [(p, g) for p in range(prompts) for g in range(group)]
    assert max(len(b.places) for b in one) <= batch and all(len(set(b.slots)) == 1 for b in one)
    assert [b.number for b in one] == list(range(len(one)))
    assert all(update_of(c, place) == b.update for b in one for place in b.places)
    for ranks_ in (2, 3, 8, 32):
        assigned = assign_batches(c, ranks_)
        assert [replace(b, dp_rank=0) for b in assigned] == one
        for own in (assigned, *([b for b in assigned if b.update == u] for u in range(updates))):
            held = Counter(dict.fromkeys(range(ranks_), 0) | Counter(b.dp_rank for b in own))
            assert max(held.values()) - min(held.values()) <= 1

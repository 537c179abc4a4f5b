"""kill -9 of every process at named points of a run of two, then --resume on the same layout and on another one.

Why these cases: a machine that is lost takes all its processes at once, whatever they are doing. At each point the
other process may be further or less far: parts of a checkpoint's files are written, weights have had one of a step's
two updates, a line of a log is torn. On the same layout the run goes on bit by bit. One process that goes on with what
two wrote has the same prompts in the same order; its first step, from the same weights, makes the same samples to the
bit, the following ones to rounding of sums of gradients. And each of a checkpoint's files is damaged in every way.
"""

import shutil

import numpy as np
import pytest
from tiny_run import ALONE, Hold, ranks, recipe, rows, train, tree, world

from prefgrpo.rewards.base import GroupScores, GroupwiseReward, Score
from prefgrpo.run.checkpoint import CheckpointError, read_newest
from prefgrpo.run.run_folder import RunFolder, step_of

pytestmark = pytest.mark.dist


class Brighter(GroupwiseReward):
    """The share of its group that an image is brighter than, with the table of wins, which the run keeps."""

    def score_group(self, group, seed):
        values = np.array([float(sample.media.pixels.mean()) for sample in group])
        wins = (values[:, None] > values) + 0.5 * (values[:, None] == values) - 0.5 * np.eye(len(values))
        counts = 1 - np.eye(len(values))
        return GroupScores([Score(float(won)) for won in wins.sum(1) / (len(values) - 1)], wins, counts)


COMMON = {
    "rollout": {"batch_size": 2},
    "reward": {"spec": f"{__name__}.Brighter"},
    "eval": {"every": 1, "max_prompts": 2},
    "checkpoint": {"every": 1, "keep": 2},
}
TRAIN = {"steps": 4, "updates_per_rollout": 2, "ema_decay": 0.5}
KINDS = {
    "lora": {"train": TRAIN | {"lr": 1e-3}},
    "split": {"train": TRAIN | {"lr": 1e-4, "lora_rank": 0}, "parallel": {"shard": 2}},
}
LOOP, SAVED = "prefgrpo.run.trainer:TrainingLoop.", "prefgrpo.run.checkpoint:"
WRITER = "torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data"
POINTS = {
    "before the first step": (0, Hold(f"{LOOP}run", before=True)),
    "in a rollout": (1, Hold("prefgrpo.rollout.batches:decode", 6)),
    "judged": (0, Hold(f"{LOOP}advantages", 3)),
    "in the gradients": (1, Hold("prefgrpo.rollout.replay:replay", 9)),
    "between two updates": (0, Hold("prefgrpo.run.policy:Policy.update", 5)),
    "updated": (0, Hold(f"{LOOP}update", 3)),
    "a torn line": (0, Hold(f"{LOOP}_report", 3)),
    "in an evaluation": (1, Hold("prefgrpo.run.evaluate:compare", 4)),
    "one of two parts written": (1, Hold(WRITER, 3, before=True)),
    "rank 0's state not written": (0, Hold(f"{SAVED}save_file", 3, before=True)),
    "exported": (0, Hold(f"{LOOP}_export", 3)),
    "not renamed yet": (0, Hold("os:replace", before=True, about="/.step_000003.")),
    "renamed": (0, Hold("os:replace", about="/.step_000003.")),
    "an old one half removed": (0, Hold("os:unlink", about="state.json")),
    "the product not renamed yet": (0, Hold("os:replace", before=True, about="/.PRODUCT.")),
    "the proof not written": (0, Hold("prefgrpo.run.evaluate:save_file", before=True)),
}
"""Rank that is waited for, and where; then both are killed."""
SAMPLE = {("split", "one of two parts written"), ("lora", "between two updates")}
NAMING = ("state.json", ".metadata")
"""They hold seconds, and the name of the folder before it was renamed."""
CASES = [
    pytest.param(kind, point, marks=() if (kind, point) in SAMPLE else pytest.mark.full)
    for kind in KINDS
    for point in POINTS
    if not (kind == "lora" and point == "one of two parts written")
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return world(tmp_path_factory.mktemp("kill"))


@pytest.fixture(scope="module")
def truths(place):
    """kind → the folder of its run that is never stopped; made when first asked for."""

    def truth(kind):
        folder = place / "runs" / kind
        if not folder.is_dir():
            all_end(ranks(recipe(place, kind, **COMMON, **KINDS[kind]), 2))
        return folder

    return truth


def all_end(runs):
    assert [r.wait() for r in runs] == [0] * len(runs), "\n".join(r.output for r in runs)


@pytest.mark.parametrize(("kind", "point"), CASES)
def test_killed_and_resumed(place, truths, kind, point):
    truth, name = truths(kind), f"{kind} {point}".replace(" ", "_").replace("'", "")
    (rank, hold), options = POINTS[point], COMMON | KINDS[kind]
    hold = hold._replace(about=hold.about.replace("PRODUCT", "lora" if kind == "lora" else "pipeline"))
    run, other = place / "runs" / name, place / "other" / name
    file = recipe(place, name, **options)
    killed = ranks(file, 2, holds={rank: hold})
    killed[rank].until_held()
    for process in killed:
        process.kill()
    if point == "a torn line":
        log = run / "metrics.jsonl"
        log.write_bytes(log.read_bytes()[:-20])
    shutil.copytree(run, other)
    newest = RunFolder(run).latest()

    all_end(ranks(file, 2, "--resume"))
    assert rows(run) == rows(truth), point
    assert [p.name for p in run.rglob(".*") if p.parent.name != "parts"] == [".lock"], "nothing half-written stays"
    for final in ("lora", "pipeline", "proof.safetensors", "checkpoints"):
        ours, theirs = ({k: v for k, v in tree(r).items() if k.startswith(final)} for r in (run, truth))
        ours, theirs = ({k: v for k, v in t.items() if k.rpartition("/")[2] not in NAMING} for t in (ours, theirs))
        assert ours.keys() == theirs.keys() and [k for k in ours if ours[k] != theirs[k]] == []

    alone = {k: v for k, v in options.items() if k != "parallel"} | {"output": str(place / "other")}
    code, output = train(recipe(place, name, **alone), "--resume")
    assert code == 0, output
    for step in range(step_of(newest) + 1 if newest else 1, 5):
        ours, theirs = (dict(np.load(RunFolder(r).group(step))) for r in (other, truth))
        assert len(ours["prompts"]) == 2 and list(theirs["prompts"]) == [ours["prompts"][0]], (step, "the same order")
        apart = np.abs(ours["images"][:1].astype(int) - theirs["images"].astype(int)).max()
        assert apart <= (0 if step == (step_of(newest) + 1 if newest else 1) else 2), (step, apart)


WAYS = {
    "one bit": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "one byte less": lambda content: content[:-1],
    "half of it": lambda content: content[: len(content) // 2],
    "half of it, the rest zeros": lambda content: content[: len(content) // 2] + bytes(-(-len(content) // 2)),
}


def test_every_damage_to_every_part_is_seen_and_the_one_before_is_used(truths):
    run = RunFolder(truths("split"))
    before, newest = run.all_checkpoints()
    files = [p.relative_to(newest) for p in (*(newest / "parts").iterdir(), newest / "state.json")]
    assert sorted(p.name for p in files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"]
    for file in files:
        whole = (newest / file).read_bytes()
        for way, damage in WAYS.items():
            (newest / file).write_bytes(damage(whole))
            path, _, meta, (error,) = read_newest(run, ALONE, lambda names: {})
            assert (path, meta["step"]) == (before, step_of(before)), (file, way)
            assert isinstance(error, CheckpointError) and str(file) in str(error) and str(newest) in str(error), way
        (newest / file).write_bytes(whole)
    assert read_newest(run, ALONE, lambda names: {})[0] == newest

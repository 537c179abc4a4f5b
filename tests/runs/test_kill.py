"""kill -9 of both processes of a two-process run at named points, then --resume on the same layout and on another.

Why these cases: losing a machine kills all its processes at once, whatever they are doing. When one process has reached
the named point, the other may be ahead or behind: a checkpoint may be partly written, the weights may have had one of a
step's two updates, a log line may be cut off. Checkpoints are written by another thread, so the loop goes on during
these kills. On the same layout the resumed run must be bit-identical. Resumed by one process, the two-process run must
see the same prompts in the same order; its first step must reproduce the samples bit for bit, later steps up to
rounding in gradient sums.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from ranks import Hold, all_end, ranks, trained
from safetensors import safe_open
from world import BRIGHTER, hidden, recipe, rows, tree, weights

from prefgrpo.run.folder import RunFolder, step_of

pytestmark = pytest.mark.dist


COMMON = {
    "rollout": {"batch_size": 2},
    "rewards": BRIGHTER,
    "eval": {"every": 1, "max_prompts": 2},
    "checkpoint": {"every": 1, "keep": 2},
}
TRAIN = {"steps": 4, "updates_per_rollout": 2, "ema_decay": 0.5}
KINDS = {
    "lora": {"train": TRAIN | {"lr": 1e-3}},
    "split": {"train": TRAIN | {"lr": 1e-4, "lora_rank": 0}, "parallel": {"shard": 2}},
}
LOOP, SAVED = "prefgrpo.trainer:Trainer.", "prefgrpo.run.checkpoint:_Writer."
WRITER = "torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data"
POINTS = {
    "before the first step": (0, Hold(f"{LOOP}_run", before=True)),
    "in a rollout": (1, Hold("prefgrpo.rollout.render:decode", 6)),
    "judged": (0, Hold("prefgrpo.run.targets:StepTargets.compute", 3)),
    "in the gradients": (1, Hold("prefgrpo.update.trajectory:replay", 9)),
    "between two updates": (0, Hold("prefgrpo.update.policy:Policy.update", 5)),
    "updated": (0, Hold(f"{LOOP}update", 3)),
    "a torn line": (0, Hold(f"{LOOP}_report", 3)),
    "in an evaluation": (1, Hold("prefgrpo.run.evaluation:compare", 4)),
    "saving has begun": (0, Hold(f"{LOOP}_save", 3)),
    "one of two parts written": (1, Hold(WRITER, 3, before=True)),
    "both parts written": (0, Hold(f"{SAVED}finish", 3, before=True)),
    "exported": (0, Hold(f"{LOOP}_export")),
    "not renamed yet": (0, Hold("os:replace", before=True, about="/.step_000003.")),
    "renamed": (0, Hold("os:replace", about="/.step_000003.")),
    "an old one half removed": (0, Hold("os:unlink", about="state.json")),
    "the product not renamed yet": (0, Hold("os:replace", before=True, about="/.PRODUCT.")),
}
"""The rank to wait for and the point where it stops; both processes are then killed."""
BOTH = ("between two updates", "not renamed yet")
ALONE = ("before the first step", *BOTH)
"""Points after which a single process, too, resumes the run."""
SHARDED = ("one of two parts written",)  # replicated weights are written by rank 0 alone
NAMING = ("state.json", ".metadata")
"""They contain timings and the temporary folder's name, so they differ between runs."""
CASES = [
    (kind, point)
    for k, point in enumerate(POINTS)
    for n, kind in enumerate(["split", "lora"])
    if point in BOTH or (kind == "split" if point in SHARDED else n == k % 2)
]
"""Each point with one of the two kinds, alternating; points where the two kinds write different files, with both."""


def header(file):
    """What a safetensors file says about its tensors."""
    with safe_open(file, "pt") as tensors:
        return tensors.metadata()


@pytest.fixture(scope="module")
def truths(place):
    """kind → folder of the uninterrupted run of that kind, created on first use."""

    def truth(kind):
        folder = place / "runs" / kind
        if not folder.is_dir():
            all_end(ranks(recipe(place, kind, **COMMON, **KINDS[kind]), 2))
        return folder

    return truth


@pytest.mark.full
@pytest.mark.parametrize(("kind", "point"), CASES)
def test_killed_and_resumed(place, truths, kind, point):
    truth, name = truths(kind), f"{kind} {point}".replace(" ", "_").replace("'", "")
    (rank, hold), options = POINTS[point], COMMON | KINDS[kind]
    hold = replace(hold, about=hold.about.replace("PRODUCT", "lora" if kind == "lora" else "pipeline"))
    run, other = place / "runs" / name, place / "other" / name
    file = recipe(place, name, **options)
    killed = ranks(file, 2, holds={rank: hold})
    killed[rank].until_held()
    for process in killed:
        process.kill()
    if point == "a torn line":
        log = run / "metrics.jsonl"
        log.write_bytes(log.read_bytes()[:-20])
    if point in ALONE:
        shutil.copytree(run, other)
    newest = RunFolder(run).latest()

    all_end(ranks(file, 2, "--resume"))
    assert rows(run) == rows(truth), point
    assert hidden(run) == [".lock"], "a temporary file is left"
    for final in ("lora", "pipeline", "checkpoints"):
        ours, theirs = ({k: v for k, v in tree(r).items() if k.startswith(final)} for r in (run, truth))
        ours, theirs = ({k: v for k, v in t.items() if k.rpartition("/")[2] not in NAMING} for t in (ours, theirs))
        apart = [k for k in ours if ours[k] != theirs.get(k)]
        headers = [k for k in apart if k.endswith(".safetensors")]  # safetensors writes a header's keys in any order
        assert ours.keys() == theirs.keys() and apart == headers
        assert [header(run / k) for k in headers] == [header(truth / k) for k in headers]
    assert weights(run) == weights(truth)

    if point not in ALONE:
        return
    alone = {k: v for k, v in options.items() if k != "parallel"} | {"output": str(place / "other")}
    trained(recipe(place, name, **alone), "--resume")
    for step in range(step_of(newest) + 1 if newest else 1, 5):
        ours, theirs = (dict(np.load(RunFolder(r).group(step))) for r in (other, truth))
        assert len(ours["prompts"]) == 2 and list(theirs["prompts"]) == [ours["prompts"][0]], (step, "order differs")
        apart = np.abs(ours["images"][:1].astype(int) - theirs["images"].astype(int)).max()
        assert apart <= (0 if step == (step_of(newest) + 1 if newest else 1) else 2), (step, apart)

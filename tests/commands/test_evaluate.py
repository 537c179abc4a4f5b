"""`prefgrpo evaluate RUN`: a checkpoint against its base model or another checkpoint, after training.

Why these cases: the result must equal the run's own evaluation to the last digit, or one of the two is wrong;
checkpoints and runs must not be mixed up; a checkpoint against itself is a tie; a second judge must really
be a different one; and few prompts or a wide interval must be reported as inconclusive.
"""

import json
import os

import pytest
from ranks import all_end, attempt, ranks, trained
from servers import JudgeServer
from world import recipe, rows, tiny_world, tree

from prefgrpo.run.folder import RunFolder
from prefgrpo.run.measures import MIN_PROMPTS

pytestmark = pytest.mark.full

MEASURED = ["--eval.rewards", "jpeg_incompressibility"]


class Indifferent(JudgeServer):
    """A judge that tells uniformly coloured images apart and calls all other pairs ties."""

    model = "second-judge"

    def _says(self, gap, tokens=("1", "2")):
        return super()._says(gap if abs(gap) > 1.5 else 0.0, tokens)


@pytest.fixture(scope="module")
def servers():
    with JudgeServer() as server, Indifferent() as second:
        yield server, second


@pytest.fixture(scope="module")
def place(tmp_path_factory, servers):
    """Two runs of three steps with EMA and a judge, two images per held-out prompt."""
    folder = tiny_world(tmp_path_factory.mktemp("evaluate_command"))
    over = {
        "judge": {"endpoints": [servers[0].url]},
        "train": {"ema_decay": 0.5, "steps": 3},
        "eval": {"samples_per_prompt": 2, "rewards": "vlm_pairwise,jpeg_incompressibility", "every": 1},
        "checkpoint": {"every": 1, "keep": 3},
    }
    for name, seed in (("one", 0), ("two", 1)):
        trained(recipe(folder, name, seed=seed, **over))
    return folder


@pytest.fixture
def evaluate(place, capsys):
    def run(target, *options, code=0):
        ended, output = attempt(capsys, "evaluate", place / "runs" / target, *options)
        assert ended == code and "Traceback" not in output, output
        written = next((line for line in output.splitlines() if line.endswith("comparison.json")), "")
        return output, json.loads(open(written).read()) if written else {}

    return run


def last(place, name):
    return [row for row in rows(place / "runs" / name) if row["kind"] == "eval"][-1]


def test_the_runs_own_last_evaluation_is_found_again(place, servers, evaluate):
    output, found = evaluate("one")
    known = last(place, "one")
    for key, row in found["win_rates"].items():
        parts = ("low", "high", *(("first", "second") if "judge" in key else ()))
        assert [row["rate"], *(row[part] for part in parts)] == [known[key], *(known[f"{key}_{p}"] for p in parts)]
        assert row["conclusion"] == f"inconclusive: fewer than {MIN_PROMPTS} prompts"
    assert set(found["win_rates"]) == {"dev/win_judge", "dev/win_jpeg_incompressibility"}
    mean = found["means"]["dev/jpeg_incompressibility"]
    assert (mean["now"], mean["before"]) == tuple(known[f"dev/jpeg_incompressibility{end}"] for end in ("", "_before"))
    assert mean["now"] != mean["before"] and found["prompts"] == {"dev": 3}
    about = found["about"]
    assert about["now"]["weights"] == "step_000003_ema" and about["against"]["weights"] == "base"
    assert "one step_000003_ema against base" in output
    out = place / "runs/one/evaluations/step_000003_ema/against_base"
    assert len([name for name in tree(out) if name.endswith(".png")]) == 2 * 6
    kept = {name: (out / name).stat().st_mtime_ns for name in tree(out) if name.endswith(".png")}
    again, _ = evaluate("one")
    first, second = ([line for line in text.splitlines() if "win rate by" in line] for text in (output, again))
    assert first == second != []
    assert kept == {name: (out / name).stat().st_mtime_ns for name in kept}


def test_checkpoints_and_runs_are_told_apart(place, evaluate):
    """Anything against itself is a tie."""
    shown = []
    for target in ("one", "one/checkpoints/step_000002", "two"):
        own = [*MEASURED, "--seed", "0", "--against", place / "runs" / target]
        _, found = evaluate(target, *own)
        rate = found["win_rates"]["dev/win_jpeg_incompressibility"]
        assert rate["rate"] == rate["low"] == rate["high"] == 0.5 and rate["conclusion"].startswith("inconclusive")
        shown.append(found["means"]["dev/jpeg_incompressibility"]["now"])
    assert len(set(shown)) == 3
    _, found = evaluate("one", *MEASURED, "--against", place / "runs/two", "--seed", "0")
    mean = found["means"]["dev/jpeg_incompressibility"]
    assert mean["now"] == shown[0] and mean["before"] == shown[2]
    assert (place / "runs/one/evaluations/step_000003_ema/against_two_step_000003_ema").is_dir()


def test_another_judge_is_asked_about_the_same_images(place, servers, evaluate):
    out = place / "runs/one/evaluations/step_000003_ema/against_base"
    kept = {name: (out / name).stat().st_mtime_ns for name in tree(out) if name.endswith(".png")}
    before = len(servers[1].requests)
    output, found = evaluate("one", "--judge.endpoints", servers[1].url)
    second = found["win_rates"]["dev/win_judge"]
    assert second["rate"] == second["first"] == second["second"] == 0.5 and second["missing"] == 0.0
    asked = [json.dumps(r) for r in servers[1].requests[before:]]
    assert len([r for r in asked if "red circle" in r]) == 2 * 6 + 1, "every pair in both orders, after a probe"
    assert any("second-judge" in line for line in found["judges"])
    assert kept == {name: (out / name).stat().st_mtime_ns for name in kept}
    nobody = ["--judge.endpoints", "http://127.0.0.1:9", "--judge.deadline-s", "1", "--out", place / "none"]
    output, _ = evaluate("one", *nobody, code=2)
    assert "http://127.0.0.1:9" in output
    (out / ".about.json").write_text("[1]")
    output, _ = evaluate("one", code=2)
    assert ".about.json is damaged" in output, output


def rank_one_sees_no_checkpoint() -> None:
    """Runs in the new process: the run may be writing checkpoints, and a listing on a shared disk may be old."""
    if os.environ["RANK"] == "1":
        RunFolder.latest = lambda _: None


@pytest.mark.dist
def test_ranks_share_the_prompts(place):
    target = place / "runs/one"
    options = [*MEASURED, "--out", str(place / "ranks")]
    all_end(ranks(target, 2, *options, command="evaluate", hook=rank_one_sees_no_checkpoint))
    found, known = json.loads((place / "ranks/comparison.json").read_text()), last(place, "one")
    for key in ("dev/win_jpeg_incompressibility", "dev/jpeg_incompressibility"):
        row = found["win_rates"].get(key) or found["means"][key]
        assert row.get("rate", row.get("now")) == pytest.approx(known[key], abs=0.01)


@pytest.mark.dist
def test_split_weights_are_read_by_any_number_of_processes(place, evaluate):
    """Full fine-tuning sharded over two processes: a single process can load the whole model from the shards."""
    over = {"train": {"lora_rank": 0, "lr": 1e-3, "steps": 1}, "parallel": {"shard": 2}, "eval": {"every": 1}}
    all_end(ranks(recipe(place, "split", **over), 2))
    assert list((place / "runs/split").glob("checkpoints/*/__1_0.distcp"))
    known, means = last(place, "split"), []
    output, found = evaluate("split", "--parallel.shard", "1", "--out", place / "whole")
    means.append(found["means"]["dev/jpeg_incompressibility"])
    all_end(ranks(place / "runs/split", 2, "--out", str(place / "parts"), command="evaluate"))
    means.append(json.loads((place / "parts/comparison.json").read_text())["means"]["dev/jpeg_incompressibility"])
    for mean in means:
        assert mean["now"] == pytest.approx(known["dev/jpeg_incompressibility"], abs=0.01) and mean["missing"] == 0
        assert mean["before"] == pytest.approx(known["dev/jpeg_incompressibility_before"], abs=0.01)
    output, _ = evaluate("split", "--out", place / "none", code=2)
    assert "parallel: expected a multiple of shard 2" in output


def test_what_cannot_be_evaluated(place, evaluate, capsys):
    for target, options, message in (
        ("one", ["--results", "x"], "--results: expected a --suite with it"),
        ("one/checkpoints/step_000009", [], "one/checkpoints/step_000009 does not exist; the checkpoints of "),
        ("one", ["--against", place / "nowhere"], "nowhere"),
        ("one", ["--out", place / "dev.txt"], "dev.txt"),
        ("none", [], "none, or a run (there is no folder"),
    ):
        output, _ = evaluate(target, *options, code=2)
        assert message in output, output
    options = ["--output", place / "runs", *MEASURED]
    sizes = ["--rollout.height", 16, "--rollout.width", 16, "--rollout.steps", 3, "--dtype", "fp32"]
    options += ["--prompts", place / "dev.txt", "--against", place / "runs/one", "--data.max-length", 24]
    code, output = attempt(capsys, "evaluate", place / "flux", *options, *sizes)
    assert code == 0 and "flux base against one_step_000003_ema" in output, output

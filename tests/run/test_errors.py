"""Bad input from users and failures in a cluster, and how a run must respond.

Why these cases: each is an item of the "Bad input" list of the project's main task. The same rule holds for all: no
existing file is overwritten; the message states what was expected, what was given and what to do, with no traceback;
the exit code is 2 (fix and start again) or 3 (stopped; resume); and training that had begun can be resumed.
"""

import json
import shutil

import pytest
import yaml
from judge_server import JudgeServer, free_port
from safetensors.torch import load_file, save_file
from tiny_run import Hold, attempt, merged, recipe, rows, start, train, trained, tree

from tests.judge.test_http import process


def untouched(folder):
    """Whether the run folder has no visible files, so that its name is still free."""
    return not [p for p in folder.glob("*") if not p.name.startswith(".")]


def refused(result, *messages):
    """Assert exit code 2, an error that contains all `messages`, and no traceback."""
    code, output = result
    assert code == 2 and "error: " in output and "Traceback" not in output, output
    for part in messages:
        assert part in output, f"{part!r} is missing in:\n{output}"


# ---- before anything runs -----------------------------------------------------------------------------------------


TYPES = "rollout: {group_size: 1}, train: {stepps: 1}, judge: {endpoints: here}"
MANY = """family: sd33, data: {prompts: /no/p.txt}, rollout: {prompts_per_step: 3},
eval: {rewards: jpeg}, train: {updates_per_rollout: 99},
rewards: [{name: vlm_pairwise, options: {template: compar}}, {name: clip, options: {modle: x}}]"""
HERE = __name__  # as users name a module of theirs
NO_JUDGE = "judge: {endpoints: ['http://127.0.0.1:9'], deadline_s: 1}"


def one_value(images, prompts):
    return [1.0]


def fails(images, prompts):
    return {}["no"]


def empty(images, prompts):
    return [None] * len(images)


MISTAKES = [
    ("model: ./nowhere", "model folder not found: './nowhere' … model_index.json"),
    ("family: sd3", "contains a FluxPipeline, expected a StableDiffusion3Pipeline: expected family: flux"),
    ("train: {lora_targets: [to_qq]}", "train.lora_targets:  … to_qq … it has  … attn.to_q"),
    ("rewards: 'jpeg_compressibility:0'", "rewards: expected a weight other than 0; use eval.rewards"),
    ("model: ./nowhere, rewards: 'clp:1,vlm_pairwize'", "folder not found … did you mean 'clip' … 'vlm_pairwise'"),
    ("rewards: 'my.py:redness=0.5'", "expected 'name' or 'name:weight', as in 'my.py:redness:0.5'"),
    # found before the judge is asked, or anything loads
    ("advantage: {combine: weighted_sun}", "expected one of weighted_sum, weighted_advantage_sum … got 'weighted_sun' "
     "(did you mean 'weighted_sum'?)"),
    ("rewards: videoalign", "videoalign takes video, but these are images"),
    (f"rewards: [vlm_pairwise, '{HERE}:one_value', '{HERE}:fails', '{HERE}:empty'], {NO_JUDGE}",
     "one_value, tried on grey images [16, 16, 3]: one_value must return one value per sample: 2, got 1 … "
     "fails, tried on grey images [16, 16, 3]: it raised KeyError: 'no'"),
    ("rewards: [{name: vlm_pairwise, options: {template: compare_edit}}], " + NO_JUDGE,
     "the template compare_edit of vlm_pairwise shows a source image, which 7 prompt(s) lack, the first: 'a red"),
    (TYPES, "group_size: expected 2 or more … train.stepps: unknown key … endpoints: expected a list"),
    (MANY, "did you mean 'sd3' … data.prompts: prompts file not found: /no/p.txt … at most one update per sample … "
           "judge template 'compar' not found … 'clip' has no option 'modle' … eval.rewards: unknown reward 'jpeg'"),
    ("rollout: {frames: 5, guidance_2: 3.0, source_area: 4096}",
     "rollout.frames: flux makes images … guidance_2: flux has one denoiser … source_area"),
    ("rewards: [{name: vlm_pairwise, options: {plan: robin}}]", "unknown pair plan 'robin' (did you mean 'round"),
    ("rewards: [{name: jpeg_compressibility, judge: {model: x}}]", "asks no judge: remove `judge` from its entry"),
    ("rollout: {rule: cps, eta: 0.5, window_low: 2, window_high: 3}",
     "step(s) [2] cannot be trained, as they are deterministic under rule cps with eta 0.5; expected a range without"),
    ("eval: {height: 18}", "expected multiples of 4 for this model, the nearest are 16 × 16, got 18 × 16"),
    ("eval: {rewards: vlm_pairwise}, judge: {endpoints: ['http://127.0.0.1:9'], deadline_s: 1}", "not reachable"),
    ("output: /dev/null/runs", "cannot be created or written … --output"),
    ("rewards: vlm_pairwise, judge: {endpoints: [], model: /no/judge}",
     "cannot load the judge '/no/judge', expected a checkpoint's folder or hub id"),
]  # fmt: skip


@pytest.mark.parametrize(("over", "messages"), MISTAKES)
def test_mistakes_in_the_recipe(place, capsys, over, messages, request):
    name = f"mistake{request.node.callspec.indices['over']}"
    refused(attempt(capsys, "train", recipe(place, name, **yaml.safe_load(f"{{{over}}}"))), *messages.split(" … "))
    assert untouched(place / "runs" / name)


FOREIGN = {"thesis.tex": "years of work", "photos/one.png": "", "metrics.jsonl": '{"theirs": 1}\n'}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_folder_with_foreign_things_stays_as_it_is(place, capsys, foreign):
    name = f"foreign_{foreign[:5]}"
    folder, file = place / "runs" / name, recipe(place, name)
    (folder / foreign).parent.mkdir(parents=True)
    (folder / foreign).write_text(FOREIGN[foreign])
    refused(attempt(capsys, "train", file), "contains another run", "nothing was changed", "another name")
    refused(attempt(capsys, "train", file, "--resume"), "is not a run of prefgrpo", "another name")
    assert tree(folder) == {foreign: FOREIGN[foreign].encode()}


def test_columns_that_nothing_reads_and_evaluation_prompts_that_are_trained_on_are_told(place):
    rows = [{"prompt": f"a thing {k}", "styl": "x"} for k in range(8)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "held.txt").write_text("a thing 3\nanother thing\n")
    files = {"data": {"prompts": str(place / "train.jsonl")}, "eval": {"prompts": str(place / "held.txt")}}
    file = recipe(place, "told", train={"steps": 1}, **files)
    output = trained(file)
    assert "WARNING: nothing reads the column(s) styl of" in output
    assert "WARNING: 1 of 2 evaluation prompts are in" in output and "train.jsonl and trained on too" in output


def test_a_resumed_run_cannot_end_before_it_began(place, capsys):
    file = recipe(place, "shorter", train={"steps": 2}, eval={"every": 0})
    trained(file)
    before = tree(place / "runs" / "shorter")
    refused(
        attempt(capsys, "train", file, "--resume", "--train.steps", 1), "has done 2 steps: expected train.steps of at"
    )
    assert tree(place / "runs" / "shorter") == before


@pytest.mark.full
def test_names_that_a_shell_would_mangle(place):
    output = trained(recipe(place, "name with spaces & é"))
    assert (place / "runs" / "name with spaces & é" / "lora").is_dir(), output


# ---- while it runs ------------------------------------------------------------------------------------------------


def test_an_absurd_learning_rate_stops_and_a_lower_one_goes_on(place):
    file = recipe(place, "absurd", train={"lr": 1e30}, checkpoint={"every": 1}, eval={"every": 0})
    code, output = train(file)
    assert code == 3 and "not finite" in output and "--resume and a lower --train.lr" in output
    assert "the newest checkpoint is" in output and [r["step"] for r in rows(place / "runs" / "absurd")] == [1]
    shutil.rmtree(place / "runs" / "absurd" / "checkpoints" / "step_000001")
    output = trained(file, "--resume", "--train.lr", "1e-3")
    assert [r["step"] for r in rows(place / "runs" / "absurd")] == [1, 2, 3, 4]


# ---- the judge ----------------------------------------------------------------------------------------------------


def judged(url, **over):
    """Options of a run rewarded by an HTTP judge, with short timeouts."""
    judge = {"endpoints": [url], "timeout_s": 2.0, "deadline_s": 3.0}
    base = {"rewards": "vlm_pairwise", "judge": judge, "eval": {"every": 0}, "checkpoint": {"every": 20}}
    return merged(base, over)


@pytest.fixture(scope="module")
def steady(place):
    """A run whose judge works throughout."""
    with JudgeServer() as server:
        trained(recipe(place, "steady", **judged(server.url)))
    return rows(place / "runs" / "steady")


AFTER_FIRST_STEP = Hold("prefgrpo.trainer:Trainer._report")


def train_with_fault(file, server, fault, count=-1):
    """(exit code, output) of a run whose judge has a fault in `count` answers (-1: in all) after the first step."""
    run = start(["train", str(file)], file.with_suffix(".log"), hold=AFTER_FIRST_STEP)
    run.until_held()
    server.count, server.fault = count, fault
    run.release()
    return run.wait(), run.output


def test_a_judge_that_is_gone_for_good_stops_the_run_which_goes_on_when_it_is_back(place, steady):
    port, folder = free_port(), place / "runs" / "gone"
    file = recipe(place, "gone", **judged(f"http://127.0.0.1:{port}", judge={"timeout_s": 1.0, "deadline_s": 2.0}))
    with process(port, "--delay", "0.02") as judge:
        run = start(["train", str(file)], place / "gone.log", hold=AFTER_FIRST_STEP)
        run.until_held()
        judge.kill()
        run.release()
        assert run.wait() == 3, run.output
    done = rows(folder)[-1]["step"]
    for part in (f"stopped: step {done + 1}: 100% of the rewards are missing", "Reasons: ", "--resume", "Connect"):
        assert part in run.output, run.output
    assert (folder / "checkpoints" / f"step_{done:06d}" / "state.json").is_file()
    before = tree(folder)
    refused(train(file, "--resume"), "the judge cannot be used")
    assert tree(folder) == before, "a resume that cannot start touches nothing"
    with JudgeServer(port=port):
        trained(file, "--resume")
    assert rows(folder) == steady


def test_a_few_garbage_answers_are_left_out_and_counted(place):
    folder = place / "runs" / "few"
    with JudgeServer(delay_s=0.02) as server:
        file = recipe(place, "few", **judged(server.url, judge={"max_missing": 0.2}))  # 3 of a step's 24
        code, output = train_with_fault(file, server, "garbage", 3)
    assert code == 0, output
    found = rows(folder)
    assert sum(r["judge/failures"] for r in found) == 3 and all(r["samples_trained"] == 8 for r in found)
    reasons = [json.loads(x)["reason"] for x in (folder / "judgements.jsonl").read_text().splitlines()]
    assert sum(bool(r) for r in reasons) == 3 and any("neither label" in r for r in reasons)


@pytest.mark.parametrize("fault", ["garbage", "hang"])
def test_a_judge_that_says_nothing_any_more_stops_the_run_with_its_reason(place, fault):
    """`hang`: the judge accepts requests but never answers, the failure that is hardest to detect."""
    folder = place / "runs" / f"all_{fault}"
    with JudgeServer(delay_s=0.02) as server:
        file = recipe(place, f"all_{fault}", **judged(server.url, judge={"timeout_s": 1.0, "deadline_s": 2.0}))
        code, output = train_with_fault(file, server, fault)
    assert code == 3 and "of the rewards are missing, more than judge.max_missing = 10%. Reasons: " in output, output
    assert any(reason in output for reason in ("neither label", "step's deadline", "did not answer"))
    assert list((folder / "checkpoints").glob("step_*")) and (folder / "report.html").is_file()


def test_evaluation_survives_a_judge_that_is_gone(place):
    """Here the judge is used for evaluation only: its metrics are missing (null) and training continues."""
    over = {
        "eval": {"rewards": "vlm_pairwise", "every": 1},
        "judge": {"deadline_s": 1.0, "timeout_s": 1.0},
        "train": {"steps": 3},
    }
    folder = place / "runs" / "measured"
    with JudgeServer(delay_s=0.01) as server:
        over["judge"]["endpoints"] = [server.url]
        code, output = train_with_fault(recipe(place, "measured", **over), server, "garbage")
    assert code == 0, output
    found = [r for r in rows(folder) if r["kind"] == "eval"]
    assert found[0]["dev/win_judge"] == 0.5 and found[-1]["dev/win_judge"] is None
    assert found[-1]["dev/win_judge_missing"] == 1.0


def test_a_base_model_with_a_nan_in_it(place):
    shutil.copytree(place / "flux", place / "poisoned")
    file = place / "poisoned" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = {k: t.clone() for k, t in load_file(file).items()}
    weights["proj_out.weight"][0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    code, output = train(recipe(place, "nan", model=str(place / "poisoned"), eval={"every": 0}))
    assert code == 3 and "Traceback" not in output
    assert "stopped: step 1: the policy produces latents that are not finite" in output


def test_no_judge_at_the_start(place, capsys):
    """The other failures of the start-up check are in tests/judge/test_http.py."""
    with JudgeServer("garbage") as mute:
        for url, *messages in (
            (f"http://127.0.0.1:{free_port()}", "cannot be used", "not reachable", "judge serve", "endpoints"),
            (mute.url, "gave no verdict on a probe pair", "that the template suits the model"),
        ):
            file = recipe(place, "down", **judged(url, judge={"timeout_s": 1.0, "deadline_s": 1.0}))
            refused(attempt(capsys, "train", file), *messages)
            assert untouched(place / "runs" / "down")

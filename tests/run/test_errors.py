"""Bad input from users and failures in a cluster, and how a run must respond.

Why these cases: one table has every mistake that a recipe can have, from YAML's traps (1e-4 is text, on is true, a
repeated key drops the first) to what rewards and objectives refuse; a recipe's mistakes are reported together, with the
closest valid key. The others are items of the "Bad input" list of the project's main task. The same rule holds for all:
no existing file is overwritten; the message states what was expected, what was given and what to do, with no traceback;
the exit code is 2 (fix and start again) or 3 (stopped; resume); and training that had begun can be resumed.
"""

import json
import shutil

import pytest
import yaml
from ranks import Hold, attempt, free_port, start, train, trained
from safetensors.torch import load_file, save_file
from servers import JudgeServer
from world import BRIGHTER, merged, recipe, rows, settings, tree

from prefgrpo.config.loading import from_dict
from prefgrpo.models.attention import FLASH
from prefgrpo.objectives import OBJECTIVES, objective_class
from prefgrpo.rewards.pairs import VlmPairwise
from prefgrpo.run.errors import errors
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


NO_JUDGE = "judge: {endpoints: ['http://127.0.0.1:9'], deadline_s: 1}"
TRAP = "(YAML reads an unquoted on, off, yes or no as true or false)"
HERE = __name__  # as users name a module of theirs
OTHER = f"{HERE}.Other"
OTHERS_MODEL = "model: … contains a FluxPipeline"
OFFLINE = {
    "data": {"prompts": "", "pairs": "PLACE/train.txt"},
    "rewards": [],
    "rollout": {"group_size": 2, "batch_size": 2},
    "train": {"objective": "dpo"},
    "eval": {"prompts": 0.2},
}
"""What changes `world.settings` into training on pairs; no table is read for these mistakes."""


def one_value(images, prompts):
    return [1.0]


def fails(images, prompts):
    return {}["no"]


def empty(images, prompts):
    return [None] * len(images)


class Other(VlmPairwise):
    template = "think"


def objective_with(name, more="", **options):
    """A row's text: an objective with its options."""
    return f"train: {json.dumps({'objective': name, 'objective_options': options})}\n{more}"


def judged(plan, size, reward="vlm_pairwise"):
    """A row's text: a pairwise reward with a plan, in groups of a size."""
    entry = {"name": reward, "options": {"plan": plan}}
    return f"rewards: {json.dumps([entry])}\nrollout: {{group_size: {size}, batch_size: 1}}"


ENDPOINT = [name for name in OBJECTIVES if objective_class(name).inputs == "endpoint"]
TRAJECTORY = [name for name in OBJECTIVES if name not in ENDPOINT]
LACKS_PAIRS = "rewards: soft_dpo trains on comparisons: expected a pairwise reward"
OF_YAML = [
    ("rollout: {lr: 1e-4}", "rollout.lr: unknown key; did you mean 'train.lr'?"),
    ("train: {beta: 0.04}", "train.beta: unknown key; did you mean 'train.kl_coef'?"),
    ("learning_rate: 3e-4", "learning_rate: unknown key; did you mean 'train.lr'?"),
    ("sample: {noise_level: 0.7}", "sample: unknown key; did you mean 'rollout.eta'?"),
    ("config: {reward_fn: {ocr: 1}}", "config: unknown key; did you mean 'rewards'?"),
    ("train:", "train: expected a mapping of keys, got None"),
    ("name: no", f"name: expected text, got False {TRAP}"),
    ("judge: {endpoints: http://h}", "judge.endpoints: expected a list, got 'http://h'"),
    ("rollout: {shift: off}", f"rollout.shift: expected a number, got False {TRAP}"),
    ("train: {steps: yes}", f"train.steps: expected a whole number, got True {TRAP}"),
    ("train: {lr: .nan}", "train.lr: expected a finite number, got nan"),
    ("train: {lr: 1}\nname: x\ntrain: {steps: 2}", "key 'train' is given twice (again in line 4)"),
    ("- a", "is not valid YAML"),
    ("train: &x {lr: *x}", "is not valid YAML: the anchor in line 2 contains itself"),
    ("a: !!python/object/apply:os.system [ls]", "is not valid YAML"),
    ("extends: gone.yaml", "recipe not found: … gone.yaml; … mistake … extends it"),
    ("extends: circle.yaml", "circular 'extends': SELF → circle.yaml → SELF"),
    ("extends: [base.yaml]", "extends: expected the name of one recipe, got ['base.yaml']"),
    ("data: {promts: p.txt}\nrollout: {group_size: 1, steps: many}\ntrian: {lr: 1}\n"
     "train: {lr: -1, stepps: 1, updates_per_rollout: 0}\njudge: {image_format: gif, endpoints: here}",
     "data.promts: unknown key; did you mean 'data.prompts'? || rollout.group_size: expected 2 or more, got 1 || "
     "rollout.steps: expected a whole number, got 'many' || "
     "trian: unknown key; did you mean 'train'? || train.lr: expected a value above 0, got -1 || "
     "train.stepps: unknown key; did you mean 'train.steps'? || "
     "train.updates_per_rollout: expected a value above 0, got 0 || "
     "judge.image_format: expected 'jpeg', 'png' or 'webp', got 'gif' || judge.endpoints: expected a list"),
]  # fmt: skip
CONTRADICTIONS = [
    ("model: ''\ndata: {prompts: ''}\njudge: {endpoints: []}",
     "data.prompts: expected a file of prompts (txt, csv, tsv, jsonl or parquet), or data.pairs, got nothing || "
     "judge.endpoints: expected at least one URL, or in `model` a judge that runs in this process, got neither || "
     "model: expected the folder or hub id of a diffusers pipeline, got nothing"),
    ("name: a/b", "name: expected a folder name, got 'a/b'"),
    ("rollout: {eta: 0}", "rollout.eta: expected a noise level above 0"),
    ("rollout: {rule: cps, eta: 1.5}", "rollout.eta: rule cps takes 0 … 1, got 1.5"),
    ("rollout: {window_low: 9}", "rollout.window_low/high: expected 0 <= low < high <= steps (3), got 9 and 2"),
    ("rollout: {window_size: 10}", "rollout.window_size: expected 0 … 2, got 10"),
    ("rollout: {rule: cps}\ntrain: {kl_form: flow_grpo}", "train.kl_form: flow_grpo divides by a variance"),
    ("judge: {deadline_s: 1, timeout_s: 2}", "judge.deadline_s: expected at least judge.timeout_s (2.0), got 1.0"),
    ("rollout: {staleness: 1}\ncheckpoint: {every: 1}",
     "checkpoint.every: expected 2 or more, because rollout.staleness: 1"),
    ("offload: [weights]", "offload: … expected parallel.shard above 1"),
    ("fp8_base: true\ntrain: {lora_rank: 0}", "fp8_base: expected false, as train.lora_rank is 0 … got true"),
    ("fp8_base: true\ncompile: true", "compile: expected false with fp8_base, got true"),
    ("train: {lora_from: PLACE, lora_rank: 0}", "train.lora_from: expected none, as train.lora_rank is 0"),
]  # fmt: skip
OF_MODEL = [
    ("model: ./nowhere", "model folder not found: './nowhere' … model_index.json"),
    ("family: sd3", "contains a FluxPipeline, expected a StableDiffusion3Pipeline: expected family: flux"),
    ("train: {lora_targets: [to_qq]}", "train.lora_targets: … to_qq … it has … attn.to_q"),
    ("rollout: {frames: 5, guidance_2: 3.0, source_area: 4096}",
     "rollout.frames: flux makes images || guidance_2: flux has one denoiser || source_area"),
    ("family: sd3\nrollout: {guidance: 1.0, negative_prompt: ugly}",
     f"rollout.negative_prompt: guidance 1 is off, expected none, got 'ugly' || {OTHERS_MODEL}"),
    ("rollout: {rule: cps, eta: 0.5, window_low: 2, window_high: 3}",
     "step(s) [2] cannot be trained, as they are deterministic under rule cps with eta 0.5; expected a range without"),
    ("eval: {height: 18}", "expected multiples of 4 for this model, the nearest are 16 × 16, got 18 × 16"),
    ("rollout: {height: 18, width: 18}", "rollout.height/width/frames: … got 18 × 18 || eval.height/width/frames:"),
    ("parallel: {shard: 4}", "expected a multiple of shard 4 × ring 1 × ulysses 1 = 4 processes, got 1"),
    ("parallel: {ulysses: 5}", "parallel.ulysses: expected a divisor of the || rollout.height/width/frames: expected a "
     "multiple of ring × ulysses = 5 tokens || eval.height/width/frames: || data.max_length: … the next is 25"),
    ("family: sd3\nparallel: {ulysses: 2}", f"sd3 does not train under ring … expected 1 and 1 || {OTHERS_MODEL}"),
    ("family: qwen_image\nparallel: {ring: 2}",
     f"qwen_image does not train under ring … expected ulysses alone || {OTHERS_MODEL}"),
    ("attention: _native_math\nparallel: {ulysses: 2}", "attention: flux trains under ring … got _native_math"),
    ("attention: native\nparallel: {ring: 2}", "attention: flux trains under ring … got native"),
    *((f"family: qwen_image\nattention: {name}\nparallel: {{ulysses: 2}}",
       f"with native, _flash_3_varlen_hub, got {name} || {OTHERS_MODEL}") for name in FLASH),
    ("output: /dev/null/runs", "cannot be created or written … --output"),
]  # fmt: skip
OF_REWARDS = [
    ("rewards: 'jpeg_compressibility:0'", "rewards: expected a weight other than 0; use eval.rewards"),
    ("model: ./nowhere\nrewards: 'clp:1,vlm_pairwize'",
     "folder not found || did you mean 'clip' || did you mean 'vlm_pairwise'"),
    ("rewards: 'my.py:redness=0.5'", "expected 'name' or 'name:weight', as in 'my.py:redness:0.5'"),
    ("rewards: [clip, clip]", "named twice; give each a name of its own"),
    ("advantage: {combine: weighted_sun}", "expected one of weighted_sum, weighted_advantage_sum … got 'weighted_sun' "
     "(did you mean 'weighted_sum'?)"),
    ("rewards: videoalign", "videoalign takes video, but these are images"),
    (f"rewards: [vlm_pairwise, '{HERE}:one_value', '{HERE}:fails', '{HERE}:empty']\n{NO_JUDGE}",
     "one_value, tried on grey images [16, 16, 3]: one_value must return one value per sample: 2, got 1 || "
     "fails, tried on grey images [16, 16, 3]: it raised KeyError: 'no'"),
    (f"rewards: [{{name: vlm_pairwise, options: {{template: compare_edit}}}}]\n{NO_JUDGE}",
     "the template compare_edit of vlm_pairwise shows a source image, which 7 prompt(s) lack, the first: 'a red"),
    ("family: sd33\ndata: {prompts: /no/p.txt}\nrollout: {prompts_per_step: 3}\neval: {rewards: jpeg}\n"
     "train: {updates_per_rollout: 99}\n"
     "rewards: [{name: vlm_pairwise, options: {template: compar}}, {name: clip, options: {modle: x}}]",
     "did you mean 'sd3' || data.prompts: prompts file not found: /no/p.txt || at most one update per sample || "
     "judge template 'compar' not found || 'clip' has no option 'modle' || eval.rewards: unknown reward 'jpeg'"),
    ("rewards: [{name: vlm_pairwise, options: {plan: robin}}]", "unknown pair plan 'robin' (did you mean 'round"),
    (judged("k_regular(3)", 7), "rewards: k_regular(3) needs 1 <= k < G and k·G even, got G = 7"),
    *((judged(plan, size, BRIGHTER), f"rewards: {plan} needs 1 <= k < G and k·G even, got G = {size}")
      for plan, size in (("k_regular(3)", 7), ("k_regular(3)", 3), ("k_regular(4)", 4), ("k_regular(0)", 4))),
    ("rewards: [{name: jpeg_compressibility, judge: {model: x}}]", "asks no judge: remove `judge` from its entry"),
    (f"rewards: [{{name: {OTHER}, judge: {{modle: b}}}}]",
     f"rewards.{OTHER}.judge.modle: unknown key; did you mean 'judge.model'?"),
    (f"rewards: [{{name: {OTHER}, judge: {{endpoints: 'http://h'}}}}]",
     f"rewards.{OTHER}.judge.endpoints: expected a list, got 'http://h'"),
    (f"rewards: [{{name: {OTHER}, judge: {{deadline_s: 1.0, timeout_s: 2.0}}}}]",
     f"rewards.{OTHER}.judge.deadline_s: expected at least judge.timeout_s"),
    ("rewards: vlm_pairwise\neval: {rewards: [{name: vlm_pairwise, judge: {model: b}}]}",
     "vlm_pairwise is the name of a trained reward: give another judge's entry its own, {name: …, reward"),
    (f"eval: {{rewards: vlm_pairwise}}\n{NO_JUDGE}", "not reachable"),
    ("rewards: vlm_pairwise\njudge: {endpoints: [], model: /no/judge}",
     "cannot load the judge '/no/judge', expected a checkpoint's folder or hub id"),
]  # fmt: skip
OF_OBJECTIVE = [
    ("rollout: {rule: flwo}", "rollout.rule: expected one of flow, dance, cps, cps_normalised, wan, or "
     "file.py:function, got 'flwo' (did you mean 'flow'?)"),
    (objective_with("nft", beto=1),
     "objective_options.beto: unknown key; did you mean 'train.objective_options.beta'?"),
    (objective_with("soft_dpo"), LACKS_PAIRS),
    ("train: {objective: dpo, updates_per_rollout: 2, update_slices: members}\nrollout: {batch_size: 2}",
     "train.updates_per_rollout: dpo compares the members of a group: expected update_slices: prompts"),
    (objective_with(f"{HERE}.Other"), "train.objective: expected a class derived from prefgrpo"),
    *((objective_with(name, "rollout: {same_noise: true}"),
       f"rollout.same_noise: {name} samples without" + f" || {LACKS_PAIRS}" * (name == "soft_dpo"))
      for name in ENDPOINT),
    *((objective_with(name, "rollout: {staleness: 1}", **options),
       f"rollout.staleness: {name} needs samples of its old policy")
      for name, options in (("nft", {}), ("awm", {"ratio": True}), ("dpo", {"reference": "old"}))),
]  # fmt: skip
OF_PAIRS = [
    ({"data": {"prompts": "p.txt"}},
     "data.prompts: expected none with data.pairs, whose rows have prompts, got 'p.txt'"),
    ({"rewards": "vlm_pairwise"}, "rewards: expected none with data.pairs … got vlm_pairwise"),
    ({"rollout": {"staleness": 1}, "trackers": ["pairs"], "advantage": {"combine": "gdpo", "std": "rank"}},
     "rollout.staleness: expected 0 with data.pairs, which need no rollout, got 1 || "
     "trackers: expected no pairs with data.pairs, as nothing is judged; remove it || "
     "advantage.combine: expected weighted_sum with data.pairs, as there is nothing to combine, got gdpo || "
     "advantage.std: expected group, global or none with data.pairs, got rank"),
    *(({"train": {"objective": name}}, f"train.objective: {name} needs samples of the policy, which data.pairs does "
       "not have; expected sft, dpo, soft_dpo") for name in ("grpo", "grpo_guard", "nft", "awm")),
    ({"train": {"objective_options": {"reference": "old"}}},
     "dpo with objective_options {'reference': 'old'} needs samples of the policy"),
    ({"data": {"pairs": "PLACE"}}, "data.pairs: expected a table of pairs, or the folder of a run, got PLACE"),
    ({"family": "ltx2"}, f"data.pairs: ltx2 makes clips with sound, which pairs from files lack || {OTHERS_MODEL}"),
]  # fmt: skip
MISTAKES = [*OF_YAML, *CONTRADICTIONS, *OF_MODEL, *OF_REWARDS, *OF_OBJECTIVE] + [
    (yaml.safe_dump(merged(OFFLINE, over)), said) for over, said in OF_PAIRS
]
"""(what changes a recipe, the mistakes that are reported: all of them, and no others)."""


@pytest.mark.parametrize(("text", "mistakes"), MISTAKES)
def test_mistakes_in_the_recipe(place, capsys, text, mistakes, request):
    """Between mistakes stands ||, between parts of one mistake …"""
    name = f"mistake{request.node.callspec.indices['text']}"
    (place / "base.yaml").write_text(yaml.safe_dump(settings(place, name)))
    file = place / f"{name}.yaml"
    (place / "circle.yaml").write_text(f"extends: {file.name}\n")
    content = text if text.startswith("extends") else f"extends: base.yaml\n{text}\n"
    file.write_text(content.replace("PLACE", str(place)).replace("SELF", file.name), encoding="utf-8")
    code, output = attempt(capsys, "train", file)
    assert code == 2 and "error: " in output and "Traceback" not in output, output
    found = output.split("\n  - ")[1:] or [output]
    expected = mistakes.replace("PLACE", str(place)).replace("SELF", file.name).split(" || ")
    assert len(found) == len(expected), output
    for parts in (mistake.split(" … ") for mistake in expected):
        assert any(all(part in one for part in parts) for one in found), (parts, output)
    assert untouched(place / "runs" / name)


ALLOWED = [
    *({"train": {"objective": name}, "rollout": {"same_noise": True}} for name in TRAJECTORY),
    *({"train": {"objective": n}, "rollout": {"staleness": 1}} for n in ("grpo", "grpo_guard", "awm", "sft", "dpo")),
    OFFLINE,
    merged(OFFLINE, {"train": {"objective_options": {"reference": "old", "decay": 0.9}}}),
]


@pytest.mark.parametrize("over", ALLOWED)
def test_what_looks_like_a_mistake_and_is_none(place, over):
    over = yaml.safe_load(yaml.safe_dump(over).replace("PLACE", str(place)))
    assert errors(from_dict(settings(place, "allowed", **over))) == []


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


@pytest.mark.full
def test_an_absurd_learning_rate_stops_and_a_lower_one_goes_on(place):
    file = recipe(place, "absurd", train={"lr": 1e30}, checkpoint={"every": 1}, eval={"every": 0})
    code, output = train(file)
    assert code == 3 and "not finite" in output and "--resume and a lower --train.lr" in output
    assert "the newest checkpoint is" in output and [r["step"] for r in rows(place / "runs" / "absurd")] == [1]
    shutil.rmtree(place / "runs" / "absurd" / "checkpoints" / "step_000001")
    output = trained(file, "--resume", "--train.lr", "1e-3")
    assert [r["step"] for r in rows(place / "runs" / "absurd")] == [1, 2, 3, 4]


# ---- the judge ----------------------------------------------------------------------------------------------------


def over_http(url, **over):
    """Options of a run rewarded by an HTTP judge, with short timeouts."""
    judge = {"endpoints": [url], "timeout_s": 2.0, "deadline_s": 3.0}
    base = {"rewards": "vlm_pairwise", "judge": judge, "eval": {"every": 0}, "checkpoint": {"every": 20}}
    return merged(base, over)


@pytest.fixture(scope="module")
def steady(place):
    """A run whose judge works throughout."""
    with JudgeServer() as server:
        trained(recipe(place, "steady", **over_http(server.url)))
    return rows(place / "runs" / "steady")


AFTER_FIRST_STEP = Hold("prefgrpo.trainer:Trainer._report")


def train_with_fault(file, server, fault, count=-1):
    """(exit code, output) of a run whose judge has a fault in `count` answers (-1: in all) after the first step."""
    run = start(["train", str(file)], file.with_suffix(".log"), hold=AFTER_FIRST_STEP)
    run.until_held()
    server.count, server.fault = count, fault
    run.release()
    return run.wait(), run.output


@pytest.mark.full
def test_a_judge_that_is_gone_for_good_stops_the_run_which_goes_on_when_it_is_back(place, steady):
    port, folder = free_port(), place / "runs" / "gone"
    file = recipe(place, "gone", **over_http(f"http://127.0.0.1:{port}", judge={"timeout_s": 1.0, "deadline_s": 2.0}))
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
        file = recipe(place, "few", **over_http(server.url, judge={"max_missing": 0.2}))  # 3 of a step's 24
        code, output = train_with_fault(file, server, "garbage", 3)
    assert code == 0, output
    found = rows(folder)
    assert sum(r["judge/failures"] for r in found) == 3 and all(r["samples_trained"] == 8 for r in found)
    reasons = [json.loads(x)["reason"] for x in (folder / "judgements.jsonl").read_text().splitlines()]
    assert sum(bool(r) for r in reasons) == 3 and any("neither label" in r for r in reasons)


@pytest.mark.parametrize("fault", ["garbage", pytest.param("hang", marks=pytest.mark.full)])
def test_a_judge_that_says_nothing_any_more_stops_the_run_with_its_reason(place, fault):
    """`hang`: the judge accepts requests but never answers, the failure that is hardest to detect."""
    folder = place / "runs" / f"all_{fault}"
    with JudgeServer(delay_s=0.02) as server:
        file = recipe(place, f"all_{fault}", **over_http(server.url, judge={"timeout_s": 1.0, "deadline_s": 2.0}))
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
            file = recipe(place, "down", **over_http(url, judge={"timeout_s": 1.0, "deadline_s": 1.0}))
            refused(attempt(capsys, "train", file), *messages)
            assert untouched(place / "runs" / "down")

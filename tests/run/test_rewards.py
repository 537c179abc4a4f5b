"""From a recipe to rewards: which judge each reward queries, with which options, and which rewards a run refuses.

Why these cases: with several judged rewards, a wrong template or server would go unnoticed, and a reward that cannot
score the run's samples must be refused before the first image.
"""

import json

import pytest
import torch
import yaml
from ranks import all_end, ranks, train
from servers import JudgeServer, speak
from world import ALONE, BRIGHTER, grey, recipe, rows, settings

from prefgrpo.arguments import PairwiseJudge, run_config
from prefgrpo.config.loading import differences, from_dict
from prefgrpo.data.answer import Answer
from prefgrpo.data.prompts import Prompt
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Reward, Sample
from prefgrpo.rewards.pairs import VlmPairwise
from prefgrpo.run.evaluation import evaluation_scorer, judges_of
from prefgrpo.run.rewards import Rewards, judge_config, unsupported

OTHER = f"{__name__}.Other"
EDIT = f"{__name__}.EditScore"


class Other(VlmPairwise):
    template = "think"


class EditScore(Reward):
    takes = ("image", "video")
    needs_source = True
    meta_keys = ("tag",)

    def ask(self, asked):
        return [Answer(1.0) for _ in asked]


def config(place, **over):
    return from_dict(settings(place, "x", **over))


def entry(name, judge=None, **options):
    return {"name": name, "options": options, "judge": judge or {}}


def test_each_reward_asks_its_own_judge_with_its_own_question(place):
    with JudgeServer() as first, JudgeServer() as second:
        second.answer = speak
        entries = [
            entry("vlm_pairwise", template="caption_match"),
            entry(OTHER, {"endpoints": [second.url], "timeout_s": 7.0}, plan="k_regular(2)"),
        ]
        judge = {"endpoints": [first.url], "timeout_s": 9.0}
        c = config(place, judge=judge, rewards=entries, eval={"rewards": []})
        rewards = Rewards(c, ALONE)
        built = rewards.build("rewards", c.rewards, [])
        one = built["vlm_pairwise"]
        other = built[OTHER]
        assert (one.plan, one.templates.images.name, one.judge.timeout_s) == ("both_orders", "caption_match", 9.0)
        assert (other.plan, other.templates.images.name, other.judge.timeout_s) == ("k_regular(2)", "think", 7.0)
        assert other.judge.config.endpoints == (second.url,) and len(rewards.notes) >= 2
        assert rewards.build("eval.rewards", c.measured, []) == built, "evaluation uses the trained objects"
        measuring = evaluation_scorer(c, built)
        assert judges_of(measuring.rewards) == {"vlm_pairwise": "judge", OTHER: OTHER}
        assert measuring.rewards == built and measuring.plan(2, 0) == [(0, 1), (1, 0)]
        rewards.close()


def test_judges_of_an_ensemble_and_an_independent_one_are_logged_by_name(place):
    """The independent one prefers dark images: its win rates, orders and answers are its own, and if it is not there
    the run ends before the model is loaded."""
    with JudgeServer() as bright, JudgeServer() as dark:
        dark.answer = lambda levels, text: f"Image {1 + (levels[0] > levels[1])}"
        ensemble = [{"name": f"judge-{k}", "reward": "vlm_pairwise"} for k in range(2)]
        second = {"name": "second_opinion", "reward": "vlm_pairwise", "judge": {"endpoints": [dark.url]}}
        second["options"] = {"template": str(place / "plain.yaml")}
        question = {"user": "{prompt}{media_1}{media_2}", "answer": "plain"}
        (place / "plain.yaml").write_text(json.dumps(question))
        about = {
            "rewards": ensemble, "judge": {"endpoints": [bright.url]}, "train": {"steps": 2},
            "eval": {"every": 2, "rewards": [second, "judge-0"]},
        }  # fmt: skip
        code, output = train(recipe(place, "second", **about))
        assert code == 0, output
        asked = len(bright.requests), len(dark.requests)
        second["judge"] = {"endpoints": ["http://127.0.0.1:1"], "deadline_s": 1.0}
        code, output = train(recipe(place, "absent", **about))
        assert code == 2 and "http://127.0.0.1:1: not reachable" in output
    assert min(asked) > 0
    folder = place / "runs" / "second"
    row = next(row for row in rows(folder) if row["kind"] == "train")
    assert row["reward/judge-0"] == row["reward/judge-1"] == pytest.approx(0.5)
    assert row["judge/requests"] == 2 * row["judge/judge-0/requests"] == 2 * row["judge/judge-1/requests"] > 0
    lines = (folder / "judgements.jsonl").read_text().splitlines()
    assert {json.loads(line)["reward"] for line in lines} == {"judge-0", "judge-1"}
    dev = [row for row in rows(folder) if row["kind"] == "eval"][-1]
    ours = dev["dev/win_judge"]
    theirs = dev["dev/win_second_opinion"]
    assert ours + theirs == pytest.approx(1) and ours != 0.5
    assert {"dev/win_second_opinion_first", "dev/win_second_opinion_second"} <= dev.keys()
    (outcomes, *_) = json.loads((folder / "eval" / "dev_000002.json").read_text())
    assert [answer["judge"] for answer in outcomes["answers"]] == ["judge-0"] * 2 + ["second_opinion"] * 2
    entries = yaml.safe_load((folder / "config.yaml").read_text())["eval"]["rewards"]
    assert [entry["name"] for entry in entries] == ["second_opinion", "judge-0"]
    assert entries[0]["reward"] == "vlm_pairwise"


def test_judges_given_from_python_have_names_of_their_own():
    listed = [PairwiseJudge("http://a"), PairwiseJudge("http://b", "second", plan="round_robin")]
    about = {"model": "m", "family": "flux", "data": {"prompts": "p"}}
    made = run_config("", None, None, listed, {}, about)[0]
    found = [(e.name, e.reward, e.judge["endpoints"], e.options) for e in made.rewards]
    assert found == [
        ("vlm_pairwise", "vlm_pairwise", ["http://a"], {}),
        ("second", "vlm_pairwise", ["http://b"], {"plan": "round_robin"}),
    ]


def test_a_bare_name_in_evaluation_is_the_trained_reward(place):
    trained = [entry("clip", device="cpu"), entry("jpeg_compressibility")]
    c = config(place, rewards=trained, eval={"rewards": ["clip", entry("jpeg_compressibility", size=64), "scenes"]})
    assert c.measured[0] == c.rewards[0] and c.measured[1].options == {"size": 64} and c.measured[2].name == "scenes"
    assert config(place, rewards=trained, eval={"rewards": []}).measured == c.rewards


def test_ranks_share_the_limit(place):
    """By those that have a group to judge, at least one request each."""
    for limit, size, prompts, share in ((64, 8, 42, 8), (10, 4, 42, 2), (3, 8, 42, 1), (64, 8, 2, 32)):
        c = config(place, judge={"concurrency": limit}, rollout={"prompts_per_step": prompts})
        for rank in range(size):
            world = World(rank, size, torch.device("cpu"))
            assert judge_config(c, c.rewards[0], world).concurrency == share


def test_options_of_a_reward_are_compared_by_name(place):
    changed = differences(config(place), config(place, rewards=[entry("jpeg_compressibility", size=8)]))
    assert changed == {"rewards.jpeg_compressibility.options.size": (None, 8)}


def test_a_training_plan_of_a_function_need_not_fit_the_pairs_of_an_evaluation(place):
    c = config(place, rewards=[entry(BRIGHTER, plan="k_regular(3)")], rollout={"group_size": 4})
    built = Rewards(c, ALONE).build("rewards", c.rewards, [])
    measuring = evaluation_scorer(c, built)
    assert measuring.rewards == built and len(built[BRIGHTER].keys(4, 0)) == 6
    measuring.begin(0, [0])
    for member, level in enumerate((200, 100)):
        measuring.add(0, member, Sample("p", grey(level)))
    found = measuring.finish()
    assert [list(answers) for answers in found.answers[BRIGHTER]] == [[(0, 1), (1, 0)]]
    assert found.values[BRIGHTER].tolist() == [[1.0, 0.0]]


def test_a_reward_that_does_not_fit_the_run_is_refused_with_all_reasons(place):
    plain = [Prompt(0, "a cat"), Prompt(1, "a dog", {"tag": "x"})]
    message = "\n".join(unsupported(["image"], "rewards", {EDIT: EditScore}, plain))
    assert "a source image, which 2 prompt(s) lack, the first: 'a cat'" in message
    assert "needs the column 'tag', which 1 prompt(s) lack, the first: 'a cat' (its columns: none)" in message


@pytest.mark.full
def test_every_comparison_of_every_process_is_logged_once_also_after_a_resume_with_fewer(place):
    """A long answer keeps its end, where the verdict stands."""

    def logged():
        files = sorted(folder.glob("judgements*.jsonl"))
        return files, [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]

    folder = place / "runs" / "logged"
    with JudgeServer() as server:
        server.answer = lambda bright, text: f"{'so ' * 2000}<answer>Image {2 - (bright[0] > bright[1])}</answer>"
        judge = {"endpoints": [server.url]}
        about = {"rewards": [entry(OTHER)], "judge": judge, "eval": {"every": 0}, "checkpoint": {"every": 1}}
        file = recipe(place, "logged", **about, train={"steps": 2})
        all_end(ranks(file, 2))
        files, lines = logged()
        asked = sum(row["judge/requests"] for row in rows(folder) if row["kind"] == "train")
        assert [file.name for file in files] == ["judgements.jsonl", "judgements_0001.jsonl"]
        key = ("step", "group", "first", "second")
        assert asked == len(lines) == len({tuple(line[k] for k in key) for line in lines})
        assert all(line["raw"].endswith("</answer>") and len(line["raw"]) < 2100 for line in lines)
        (folder / "checkpoints" / "step_000002").rename(folder / "lost")
        all_end(ranks(file, 1, "--resume"))
    files, again = logged()
    assert sorted(line["group"] for line in again) == sorted(line["group"] for line in lines)
    assert {line["step"] for line in map(json.loads, files[1].read_text("utf-8").splitlines())} == {1}

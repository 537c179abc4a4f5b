"""Evaluation and export: paired images, unbiased win rates, and stock diffusers reproducing the trainer's images.

Why these cases: before and after must share their noise and differ only in the weights; missing verdicts must not
count; the confidence interval must be over prompts, since images of one prompt are not independent; the export must
be the policy that was evaluated (EMA included), with its alpha, loadable without this project.
"""

import json
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_file
from world import ALONE, rows, settings, tree

from prefgrpo.commands.cli import main
from prefgrpo.config.loading import from_dict
from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import prompt_sets, step_prompts
from prefgrpo.judge.client import Judge
from prefgrpo.rewards.base import Reward
from prefgrpo.rewards.functions import FunctionPairs
from prefgrpo.rewards.pairs import VlmPairwise
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.rollout.render import sample, to_uint8
from prefgrpo.run.checkpoint import CheckpointError
from prefgrpo.run.evaluation import BothSamples, compare
from prefgrpo.run.measures import JUDGE, Measure, compared
from prefgrpo.run.notes import start_notes
from prefgrpo.sde.noise import initial_latents
from prefgrpo.trainer import Trainer

# ---- the prompts --------------------------------------------------------------------------------------------------


def held_out_of(place, count, seed=0, **evaluation):
    """(training prompts, held-out prompts) for a file of `count` prompts."""
    (place / "many.txt").write_text("\n".join(f"prompt {k}" for k in range(count)))
    content = settings(place, "x", seed=seed, data={"prompts": str(place / "many.txt")}, eval={"prompts": 0.05})
    config = from_dict(content | {"eval": content["eval"] | evaluation})
    prompts, sets = prompt_sets(config)
    each = config.rollout.prompts_per_step
    seen = {prompts[i].text for step in range(3 * count) for i in step_prompts(len(prompts), each, seed, step)}
    assert seen == {p.text for p in prompts}, "every training prompt is used"
    return seen, [p.text for p in sets.get("dev", [])]


@pytest.mark.parametrize(
    ("count", "evaluation", "held"),
    [
        (19, {}, 0), (20, {}, 5), (100, {}, 25), (200, {}, 32), (3000, {}, 64), (3000, {"max_prompts": 100}, 100),
        (200, {"max_prompts": 10}, 10),
        (100, {"prompts": 0}, 0), (100, {"prompts": 0.5}, 50), (100, {"every": 0}, 0),
    ],
)  # fmt: skip
def test_held_out_prompts_are_never_trained_on(place, count, evaluation, held):
    trained, found = held_out_of(place, count, **evaluation)
    assert len(found) == held and not trained & set(found) and len(trained) == count - held
    assert held_out_of(place, count, **evaluation)[1] == found
    if held > 1:
        assert held_out_of(place, count, seed=1, **evaluation)[1] != found
        files = {"prompts": str(place / "dev.txt")}, {"final_prompts": str(place / "dev.txt")}
        assert all(len(held_out_of(place, count, **evaluation | file)[0]) == count for file in files)


@pytest.mark.parametrize(("counts", "told"), [({"dev": 29, "test": 5}, True), ({"dev": 30, "test": 5}, False)])
def test_a_run_says_at_its_start_that_it_cannot_conclude(place, counts, told):
    adapter = SimpleNamespace(lora_rank=4, frames=lambda _: None, trainable=list)
    notes = start_notes(from_dict(settings(place, "x")), ALONE, SimpleNamespace(adapter=adapter), None, 100, counts)
    _, line = islice(notes, 2)
    assert ("fewer than 30, so no result will be conclusive" in line) == told


def test_pictures_are_rounded_as_diffusers_rounds():
    from diffusers.image_processor import VaeImageProcessor

    images = torch.rand(2, 3, 4, 6)
    stock = VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(images))
    assert np.array_equal(to_uint8(images).numpy(), np.stack([np.asarray(p) for p in stock]))


# ---- a run's evaluation -------------------------------------------------------------------------------------------


class Bright(Judge):
    """A judge that prefers the brighter image and gives no verdict on every seventh pair."""

    model = "bright"
    streams = False
    clips = False

    def __init__(self):
        self.asked = 0

    async def ask(self, query, once=False):
        raise AssertionError("a judge in this process gets all pairs of a group")

    def ask_all(self, queries):
        out = []
        for first, second in (query.media for query in queries):
            self.asked += 1
            gap = float(first.pixels.mean()) - float(second.pixels.mean())
            lost = self.asked % 7 == 0
            out.append(Answer(None, "lost") if lost else Answer(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0))
        return out


SAMPLING = {"guidance": 2.0}


@pytest.fixture(scope="module")
def run(place):
    """A finished run with two sets, several images per prompt, EMA and alpha ≠ rank."""
    over = {
        "rollout": SAMPLING,
        "train": {"ema_decay": 0.5, "steps": 3},
        "eval": {"samples_per_prompt": 2, "max_prompts": 2, "final_prompts": str(place / "train.txt"), "every": 1},
    }
    trainer = Trainer(from_dict(settings(place, "evaluated", **over)))
    trainer.train()
    return trainer


def noise_ids(evaluator, index):
    return torch.tensor([evaluator.eval_set.first_id + i for i in index])


def test_before_and_after_differ_in_the_weights_only(run):
    for name in ("dev", "test"):
        with np.load(run.folder.report_images(name, 0)) as start:
            assert np.array_equal(start["before"], start["now"])
        with np.load(run.folder.report_images(name, 3)) as end:
            assert not np.array_equal(end["before"], end["now"])
            assert np.abs(end["before"].astype(int) - end["now"]).mean() < 64, "the same noise gives a similar image"
    found = rows(run.folder.root)
    assert [(r["step"], r["set"]) for r in found if r["kind"] == "eval"] == [
        (0, "dev"), (0, "test"), (1, "dev"), (2, "dev"), (3, "dev"), (3, "test"),
    ]  # fmt: skip
    start = found[0]
    assert start["dev/win_jpeg_incompressibility"] == 0.5, "the policy ties with itself"
    assert start["dev/jpeg_incompressibility"] == start["dev/jpeg_incompressibility_before"]
    assert len(json.loads(run.folder.prompts("dev").read_text())) == 4
    dev, test = (run.evaluators[name].eval_set for name in ("dev", "test"))
    assert dev.group == [0, 0, 1, 1] and test.first_id - dev.first_id >= 2**32 and dev.first_id > 2**61


def test_a_resumed_run_compares_with_the_stored_images_of_the_start(run):
    evaluator = run.evaluators["dev"]
    before = evaluator.before
    evaluator.start(resumed=True)
    assert all(np.array_equal(a, b) for a, b in zip(before, evaluator.before, strict=True))
    file = run.folder.initial_image("dev", 2)
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"000002\.npz, an image of the starting policy, is missing"):
        evaluator.start(resumed=True)
    file.write_bytes(content)


def test_the_outcome_of_every_image_is_kept(run):
    """Two prompts with two images each; the mean win is the row's win rate."""
    row = next(r for r in rows(run.folder.root) if r["kind"] == "eval" and (r["step"], r["set"]) == (3, "test"))
    kept = json.loads(run.folder.outcomes("test", 3).read_text())
    assert [k["prompt"] for k in kept] == [0, 0, 1, 1] and all("answers" in k for k in kept)
    assert np.mean([k["wins"]["jpeg_incompressibility"] for k in kept]) == row["test/win_jpeg_incompressibility"]


def test_a_renderer_is_stock_sampling_at_the_sets_noise_and_guidance(run, monkeypatch):
    evaluator = run.evaluators["dev"]
    other = replace(run.config, rollout=replace(run.config.rollout, guidance=4.0))
    monkeypatch.setattr(evaluator, "sizes", other.eval_sampling)
    alone, together = evaluator.render([3]), evaluator.render([0, 1, 2, 3])
    assert np.abs(alone[0].astype(int) - together[3]).max() <= 1
    latents = initial_latents(0, noise_ids(evaluator, [3]), run.adapter.latent_shape(evaluator.sizes))
    pipe = run.adapter.pipe
    stock = pipe(
        evaluator.eval_set.items[3].text, height=16, width=16, num_inference_steps=3, guidance_scale=4.0,
        max_sequence_length=24, latents=latents, output_type="pt",
    ).images  # fmt: skip
    assert np.abs(to_uint8(stock).numpy().astype(int) - alone[0]).max() <= 1
    assert evaluator.render([]) == []


def test_the_judges_win_rate_is_in_both_orders_and_without_lost_verdicts(run):
    evaluator = run.evaluators["dev"]
    keep = evaluator.scorer
    evaluator.scorer = Scorer({"v": VlmPairwise(Bright())}, 2)
    now = evaluator.render(list(range(4)))
    evaluator.before = [(image * 0.5).astype(np.uint8) for image in now]
    won = evaluator.run(3).metrics()
    assert won["dev/win_judge"] == won["dev/win_judge_first"] == won["dev/win_judge_second"] == 1.0
    assert won["dev/win_judge_first_missing"] == 0.25 or won["dev/win_judge_second_missing"] == 0.25
    assert list(evaluator.reasons.values()) == [1]
    evaluator.before = now
    assert evaluator.run(3).wins[JUDGE].value == 0.5
    evaluator.scorer = keep


class Levels(Reward):
    """The mean of the pixels, and a count of the samples that were scored."""

    seen = 0

    def ask(self, asked):
        samples = [sample for (sample,) in asked]
        self.seen += len(samples)
        return [
            Answer(float(s.media.pixels.mean()), parts={"red": float(s.media.pixels[..., 0].mean())}) for s in samples
        ]


def test_the_images_of_the_start_are_drawn_and_scored_once_and_judged_by_nobody(run, monkeypatch):
    """Their row is that of a comparison with themselves, without the two orders of a judge that was not asked."""
    evaluator = run.evaluators["dev"]
    monkeypatch.setattr(evaluator, "render", None)
    levels = Levels()
    judge = Bright()
    monkeypatch.setattr(evaluator, "scorer", Scorer({"v": VlmPairwise(judge), "w": FunctionPairs(max), "l": levels}, 2))
    found = evaluator.run(0).metrics()
    both = zip(evaluator.eval_set.items, evaluator.before, strict=True)
    pairs = [BothSamples(*[sample(p, Media(image), evaluator.sizes)] * 2) for p, image in both]
    assert (judge.asked, levels.seen) == (0, len(pairs)) and evaluator.reasons == {}
    judge.asked = 0
    measures = compare(Scorer({"w": FunctionPairs(lambda *_: 0.5), "l": levels}, 2), pairs).measures
    tied = [of_pair | {JUDGE: Measure(wins=0.5)} for of_pair in measures]
    want = compared("dev", evaluator.eval_set.group, tied).metrics()
    assert found == want and found["dev/win_judge"] == found["dev/win_l"] == 0.5 and "dev/l.red" in found


# ---- the product --------------------------------------------------------------------------------------------------


def stock_images(pipe, run):
    """The images of the last evaluation's report drawn by a stock pipeline, uint8."""
    evaluator = run.evaluators["dev"]
    index = evaluator.report_indices()
    latents = initial_latents(0, noise_ids(evaluator, index), run.adapter.latent_shape(evaluator.sizes))
    prompts = [evaluator.eval_set.items[i].text for i in index]
    size = {"height": 16, "width": 16, "num_inference_steps": 3, "guidance_scale": 2.0, "max_sequence_length": 24}
    return to_uint8(pipe(prompts, latents=latents, output_type="pt", **size).images).numpy()


def furthest(run, images):
    """Largest difference between images and those of the run's last evaluation, in steps of 1/255."""
    evaluated = np.load(run.folder.all_report_images("dev")[-1])["now"]
    return np.abs(images.astype(int) - evaluated).max()


def test_stock_diffusers_draws_the_evaluated_images_from_the_saved_lora(run, place):
    """Every family: test_families.py. What a run saves is the policy that it evaluated, also without its header."""
    file = run.folder.root / "lora" / "pytorch_lora_weights.safetensors"
    pipe = FluxPipeline.from_pretrained(place / "flux")
    assert furthest(run, stock_images(pipe, run)) > 1, "the training must matter for this test to mean anything"
    pipe.load_lora_weights(str(file.parent))
    assert furthest(run, stock_images(pipe, run)) <= 1
    pipe.unload_lora_weights()
    pipe.load_lora_weights(load_file(file))  # without the file's metadata
    assert furthest(run, stock_images(pipe, run)) <= 1, "alpha / rank = 1.5 is in the weights"


def test_a_fully_trained_pipeline_is_exported_whole(place):
    over = {"lora_rank": 0, "lr": 1e-3, "steps": 2, "ema_decay": 0.5}
    done = Trainer(from_dict(settings(place, "full", train=over, rollout=SAMPLING)))
    done.train()
    pipe = FluxPipeline.from_pretrained(done.folder.root / "pipeline")
    assert furthest(done, stock_images(pipe, done)) <= 1
    assert not (done.folder.root / "lora").exists()
    assert main(["export", str(done.folder.root)]) == 0
    assert tree(done.folder.root / "exports" / "step_000002") == tree(done.folder.root / "pipeline")


def loras(folder):
    """{name: bytes of the tensor} of the LoRA in a folder."""
    (file,) = folder.glob("*.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


def test_any_checkpoint_is_exported(run, tmp_path):
    """The newest is what the run wrote at its end; an older one is another LoRA."""
    checkpoints = run.folder.all_checkpoints()
    final = loras(run.folder.root / "lora")
    assert loras(checkpoints[-1] / "lora") == final != loras(checkpoints[0] / "lora"), "in every checkpoint, with EMA"
    for name, target in (("newest", run.folder.root), ("older", checkpoints[0])):
        assert main(["export", str(target), "--out", str(tmp_path / name)]) == 0
        assert (loras(tmp_path / name) == final) == (name == "newest")
        before = tree(tmp_path / name)
        assert main(["export", str(checkpoints[-1]), "--out", str(tmp_path / name)]) == 2
        assert tree(tmp_path / name) == before != {}, "a folder with files in it is not replaced"
        assert main(["export", str(target), "--format", "comfy", "--out", str(tmp_path / "comfy" / name)]) == 0
        assert (loras(tmp_path / "comfy" / name) == final) == (name == "newest")
        assert loras(tmp_path / name).keys() == final.keys()
        for form in ("diffusers", "comfy"):
            file = tmp_path / f"{name} {form}.safetensors"
            assert main(["export", str(target), "--format", form, "--out", str(file)]) == 0
            assert file.is_file() and (load_file(file).keys() == final.keys())
        assert main(["export", str(target), "--format", "comfy"]) == 0
    names = [f"{run.folder.root.name}_{checkpoint.name}.safetensors" for checkpoint in checkpoints]
    assert sorted(f.name for f in (run.folder.root / "comfy").iterdir()) == [names[0], names[-1]]

"""Training on pairs from files: runs, their first gradients, held-out accuracy, and mistakes of the configuration.

The oracle of gradients and accuracy is the stock FLUX transformer and VAE in fp64, the LoRA merged by hand, under the
losses as their papers write them: Diffusion-DPO (2311.12908, eq. 14), IPO (2310.12036, eq. 17), DPO with label noise
(cDPO) and flow matching. Weights are changed first, so that policy and reference differ. All images have the size of
their bucket; crops are in tests/rollout/test_buckets.py.
"""

import json
import os
from dataclasses import replace
from functools import cache

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
import yaml
from diffusers import FluxPipeline
from PIL import Image
from ranks import Hold, all_end, attempt, ranks, start
from torch.func import functional_call
from torch.nn.functional import logsigmoid
from world import batches_of, merged, recipe, rows, settings, tiny_world, tree, weights

from prefgrpo.config.loading import from_dict, to_dict
from prefgrpo.data.tables import DataError
from prefgrpo.report import write_report
from prefgrpo.rollout.source_images import fit
from prefgrpo.rollout.stored_groups import unguided
from prefgrpo.run.evaluation import DRAWS
from prefgrpo.sde.noise import HELD_OUT_GROUPS, endpoint_noise, endpoint_normal
from prefgrpo.tiny import pipelines
from prefgrpo.trainer import Trainer
from prefgrpo.update.policy import Policy

SIZES = ((16, 16), (20, 12))
"""Height and width of the groups' images, alternating: two of the run's buckets."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Tables of 24 pairs and of 24 groups of four, each of its own prompt."""
    folder = tiny_world(tmp_path_factory.mktemp("offline"))
    rng = np.random.default_rng(0)
    pairs = []
    groups = []
    for k in range(24):
        height, width = SIZES[k % 2]
        names = [f"{k}_{m}.png" for m in range(4)]
        for name in names:
            Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name)
        pair = {"prompt": f"thing {k}", "chosen": names[0], "rejected": names[1], "weight": 1 + k % 3}
        pairs.append(pair | {"probability": (1.0, 0.8, 0.3)[k % 3]})
        wins = np.tril(rng.choice([0.0, 0.3, 0.5, 0.9], (4, 4)), -1)
        wins = (wins + np.triu(1 - wins.T, 1)).astype(object)
        wins[range(4), range(4)] = None
        wins[0, 3] = wins[3, 0] = None
        groups.append({"prompt": f"thing {k}", "samples": names, "wins": wins.tolist(), "weight": 1 + k % 3})
    for name, found in (("pairs", pairs), ("groups", groups)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


def offline(place, objective="dpo", size=2, **train):
    """What changes `world.settings` into training on the table with groups of this size."""
    options = train.pop("options", {})
    return {
        "data": {"prompts": "", "pairs": str(place / ("pairs.jsonl" if size == 2 else "groups.jsonl"))},
        "rewards": [],
        "rollout": {"group_size": size, "batch_size": size, "prompts_per_step": 3},
        "train": {"objective": objective, "objective_options": options} | train,
        "eval": {"prompts": 0.2, "rewards": "jpeg_incompressibility"},
    }


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_a_lora_is_trained_from_a_table(trainer, place):
    """Pairs are held out by prompt; images before and after are compared as in every run; the report is written."""
    one = trainer(**offline(place))
    held = {group.prompt.text for group in one.source.held}
    assert len(held) == 6 and not held & {group.prompt.text for group in one.source.groups}
    assert held == {prompt.text for prompt in one.source.sets["dev"]} and len(one.source.groups) == 18
    result = one.train()
    trained = [row for row in rows(result.folder) if row["kind"] == "train"]
    evaluated = [row for row in rows(result.folder) if row["kind"] == "eval"]
    assert [row["step"] for row in evaluated] == [0, 2, 4] and len(trained) == 4
    assert trained[0]["loss"] == pytest.approx(2 * np.log(2), rel=0.5) and trained[0]["pairs/accuracy"] == 0.5
    assert all(row["samples_trained"] == 6 and 0 <= row["pairs/accuracy"] <= 1 for row in trained)
    assert evaluated[0]["dev/pairs_accuracy"] == 0.5 and evaluated[0]["dev/pairs_margin"] == 0
    assert all({"dev/win_jpeg_incompressibility", "dev/pairs_low"} <= row.keys() for row in evaluated)
    assert (result.lora / "pytorch_lora_weights.safetensors").is_file()
    page = write_report(result.folder).read_text()
    assert "Pairs ranked rightly" in page and "Verdicts on the pairs" in page and "The same prompts before" in page
    share = 100 * evaluated[-1]["dev/pairs_accuracy"]
    assert f"ranks {share:.0f}\u00a0% of the held-out pairs rightly; the initial" in page


@pytest.mark.full
def test_images_before_and_after_without_a_reward(trainer, place):
    one = trainer(**offline(place, "sft", updates_per_rollout=3, steps=1) | {"eval": {"prompts": 0.2, "rewards": []}})
    result = one.train()
    assert result.win_rate is None and result.metrics.keys() == {
        f"dev/pairs_{name}" for name in ("accuracy", "margin", "low", "high", "prompts")
    }
    (row,) = [row for row in rows(result.folder) if row["kind"] == "train"]
    assert row["updates"] <= 3 and row["samples_trained"] <= 3 and "pairs/accuracy" not in row
    with np.load(one.folder.report_images("dev", 1)) as images:
        assert images["before"].shape == images["now"].shape == (6, 16, 16, 3)
        assert not np.array_equal(images["before"], images["now"])
    with np.load(one.folder.group(1)) as shown:
        assert shown["wins"].shape == shown["counts"].shape and shown["wins"].shape[1:] == (2, 2)


@pytest.mark.full
@pytest.mark.dist
def test_killed_in_an_update_and_resumed(place):
    """Bit by bit as without the kill, with an old file of pairs that was moved."""
    options = offline(place, updates_per_rollout=3, ema_decay=0.5)
    options["checkpoint"] = {"every": 1}
    whole = recipe(place, "whole", **options)
    killed = recipe(place, "killed", **options)
    run = start(["train", str(whole)], place / "whole.log")
    hold = Hold("prefgrpo.update.policy:Policy.update", 8)
    other = start(["train", str(killed)], place / "killed.log", hold=hold)
    assert run.wait() == 0, run.output
    other.until_held()
    other.kill()
    again = start(["train", str(killed), "--resume"], place / "again.log")
    assert again.wait() == 0 and "resumed from" in again.output, again.output
    one = place / "runs" / "whole"
    two = place / "runs" / "killed"
    assert rows(one) == rows(two) and weights(one) == weights(two)
    images = [{name: data for name, data in tree(run / "eval").items() if name.endswith(".json")} for run in (one, two)]
    assert images[0] == images[1]


@pytest.mark.full
def test_a_resumed_run_has_the_same_pairs(place, trainer):
    table = place / "own.jsonl"
    lines = (place / "pairs.jsonl").read_text().splitlines()
    table.write_text("\n".join(lines))
    options = offline(place, steps=1) | {"eval": {"every": 0}, "checkpoint": {"every": 1}}
    options["data"] = {"prompts": "", "pairs": str(table)}
    trainer("own", **options).train()
    row = json.loads(lines[3])
    lines[3] = json.dumps(row | {"probability": 0.9})
    table.write_text("\n".join(lines))
    with pytest.raises(Exception, match=r"own\.jsonl .* different prompts, images or verdicts .*\(pairs of train\)"):
        trainer("own", resume=True, **options)


@pytest.mark.full
def test_commands(place, capsys):
    """preprocess encodes everything, so that a dry run and a run need no encoders; generate and evaluate use the run's
    prompts."""
    options = offline(place, steps=1)
    options["data"] = options["data"] | {"cache": str(place / "cache")}
    file = recipe(place, "commands", **options)
    code, output = attempt(capsys, "preprocess", file)
    assert code == 0 and "72 texts, sources and samples encoded now" in output, output
    code, output = attempt(capsys, "train", file, "--dry-run")
    assert code == 0 and "velocity error" in output and "held out: 6 groups" in output, output
    assert "16 × 16: " in output and "20 × 12: " in output
    code, output = attempt(capsys, "train", file)
    assert code == 0 and "complete, no text encoder was loaded" in output, output
    run = place / "runs" / "commands"
    code, output = attempt(capsys, "generate", run, "--samples", 1, "--out", place / "made")
    assert code == 0 and len(list((place / "made").glob("*.png"))) == 24, output
    code, output = attempt(capsys, "evaluate", run)
    assert code == 0 and "win rate by dev/jpeg_incompressibility" in output and "6 prompts (dev)" in output, output


# ---- the first gradient ---------------------------------------------------------------------------------------------


def dump(folder, monkeypatch=None):
    """Policies start with changed weights; the gradient of the first update is stored instead of being applied."""
    begin = Policy.__init__

    def changed(self, *arguments, **options):
        begin(self, *arguments, **options)
        with torch.no_grad():
            for number, (name, p) in enumerate(self.parameters.items()):
                if "lora_B" in name:
                    p.copy_((torch.sin(torch.arange(p.numel()) + number) / 20).view_as(p))

    def stored(self, world, position):
        world.sum_gradients(self.params)
        if world.main:
            torch.save({name: (p.detach(), p.grad) for name, p in self.parameters.items()}, f"{folder}/gradient.pt")
        self.optimizer.zero_grad()
        return 1.0

    for name, function in (("__init__", changed), ("update", stored)):
        if monkeypatch is None:
            setattr(Policy, name, function)
        else:
            monkeypatch.setattr(Policy, name, function)


def dump_here():
    """`dump` in a new process."""
    dump(os.environ["DUMP"])


class Oracle:
    """The stock model in fp64, with a LoRA merged by hand."""

    def __init__(self, place, lora, scale=6 / 4, size=None):
        """size: width and height to which all images are cropped."""
        self.size = size
        self.pipe = FluxPipeline.from_pretrained(place / "flux", dtype=torch.float32)
        self.net = self.pipe.transformer.double()
        self.vae = self.pipe.vae.double()
        self.base = {name: tensor.detach() for name, tensor in self.net.named_parameters()}
        self.lora = {name: tensor.double().requires_grad_() for name, tensor in lora.items()}
        self.policy = dict(self.base)
        for name in [name for name in self.lora if ".lora_A." in name]:
            layer = name.replace("lora_A.default.", "")
            low = self.lora[name.replace("lora_A", "lora_B")] @ self.lora[name]
            self.policy[layer] = self.base[layer] + scale * low

    def image(self, file):
        """An image, at its size or cropped."""
        return fit(Image.open(file), self.size) if self.size else Image.open(file)

    @cache  # noqa: B019  (the oracle lives as long as its test)
    @torch.no_grad()
    def latents(self, file):
        """[L, 4C] of an image file."""
        pixels = torch.from_numpy(np.array(self.image(file))).double().movedim(-1, 0)[None] / 127.5 - 1
        x = self.vae.encode(pixels).latent_dist.mode()
        x = (x - self.vae.config.shift_factor) * self.vae.config.scaling_factor
        return FluxPipeline._pack_latents(x, *x.shape)[0]

    @cache  # noqa: B019
    @torch.no_grad()
    def text(self, prompt):
        """T5 and CLIP embeddings, and position ids."""
        return self.pipe.encode_prompt(prompt, prompt_2=None, max_sequence_length=24)

    def error(self, weights, place, prompt, name, number, draw, draws):
        """d of one image."""
        image = self.image(place / name)
        rows = image.height // 4
        columns = image.width // 4
        x0 = self.latents(place / name)
        noise = endpoint_noise(0, torch.tensor([number]), draw, tuple(x0.shape))[0].double()
        u = (draw + torch.special.ndtr(endpoint_normal(0, torch.tensor([number]), draw))) / draws
        t = u.clamp(1e-3, 1 - 1e-3)
        embeds, pooled, text_ids = self.text(prompt)
        ids = FluxPipeline._prepare_latent_image_ids(1, rows, columns, "cpu", torch.float64)
        given = {
            "hidden_states": ((1 - t) * x0 + t * noise)[None],
            "timestep": t,
            "guidance": torch.tensor([3.5], dtype=torch.float64),
            "pooled_projections": pooled.double(),
            "encoder_hidden_states": embeds.double(),
            "txt_ids": text_ids.double(),
            "img_ids": ids,
            "return_dict": False,
        }
        v = functional_call(self.net, weights, kwargs=given)[0]
        return (v - (noise - x0)).square().mean()


def dpo(r, wins, beta):
    """−log σ(½β[(d_ref − d)(winner) − (d_ref − d)(loser)]); the winner and the loser by their mean win rates."""
    rate = torch.tensor(np.nanmean(wins, 1))
    return -logsigmoid(0.5 * beta * (r[rate.argmax()] - r[rate.argmin()]))


def of_pairs(form):
    """The mean over judged pairs of a loss of ½β times the difference of implicit rewards, and the verdict."""

    def loss(r, wins, beta):
        pairs = [(i, j) for i in range(len(r)) for j in range(i) if not np.isnan(wins[i][j])]
        return sum(form(0.5 * beta * (r[i] - r[j]), wins[i][j]) for i, j in pairs) / len(pairs)

    return loss


def cross_entropy(x, p):
    return -p * logsigmoid(x) - (1 - p) * logsigmoid(-x)


def ipo(x, p):
    """(x − 1/2τ)² for the winner, with 1/2τ = ½; of a probability its expectation without its constant."""
    return p * (x - 0.5) ** 2 + (1 - p) * (x + 0.5) ** 2


def logit(x, p):
    p = min(max(p, 0.02), 0.98)
    return (x - np.log(p / (1 - p))) ** 2


LOSSES = {
    "dpo": (dpo, {"beta": 30.0}),
    "soft_dpo": (of_pairs(cross_entropy), {"beta": 30.0}),
    "ipo": (of_pairs(ipo), {"beta": 30.0, "form": "ipo"}),
    "logit": (of_pairs(logit), {"beta": 30.0, "form": "logit"}),
    "sft": (None, {}),
}


def expected(place, groups, oracle, name, draws=2):
    """The gradient by parameter of the mean loss of the first step's groups, and how far policy and reference are."""
    loss, options = LOSSES[name]
    total = 0.0
    for number, group in enumerate(groups):
        files = [sample.file for sample in group.samples]
        for draw in range(draws):
            at = (place, group.prompt.text)
            d = [oracle.error(oracle.policy, *at, file, number, draw, draws) for file in files]
            with torch.no_grad():
                d_ref = [oracle.error(oracle.base, *at, file, number, draw, draws) for file in files]
            r = torch.stack(d_ref) - torch.stack(d)
            best = int(np.nanmean(group.wins, 1).argmax())
            of_group = d[best] if loss is None else loss(r, group.wins, options["beta"])
            total = total + group.weight * of_group / draws / len(groups)
    grads = torch.autograd.grad(total, list(oracle.lora.values()))
    return dict(zip(oracle.lora, grads, strict=True)), float(total.detach())


def compare(place, folder, groups, name, metrics=None, size=None):
    found = torch.load(folder / "gradient.pt")
    oracle = Oracle(place, {key: p for key, (p, _) in found.items()}, size=size)
    want, loss = expected(place, groups, oracle, name)
    flat = torch.cat([found[key][1].flatten().double() for key in want])
    wanted = torch.cat([want[key].flatten() for key in want])
    assert (flat - wanted).norm() <= 3e-5 * wanted.norm() and wanted.norm() > 0  # fp32; 1.4e-5 on some CPUs
    if metrics is not None:
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)


CASES = [("dpo", 2), ("dpo", 4), ("soft_dpo", 4), ("ipo", 2), ("ipo", 4), ("logit", 4), ("sft", 2), ("sft", 4)]
QUICK = [("dpo", 2), ("ipo", 4)]


@pytest.mark.parametrize(
    ("name", "size"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.full) for c in CASES]
)
def test_the_first_gradient(trainer, place, tmp_path, monkeypatch, name, size):
    """Groups of two sizes, with weights, ties and soft verdicts; of four also in batches of two, which need a pass for
    the errors first."""
    dump(tmp_path, monkeypatch)
    options = {"draws": 2, "times": "uniform"} | LOSSES[name][1]
    over = offline(place, "soft_dpo" if name in ("ipo", "logit") else name, size, options=options)
    over["rollout"]["batch_size"] = 2
    one = trainer(**over | {"eval": {"every": 0}})
    one.interrupt.install()
    rollout = one.generate(0)
    batches = rollout.batches
    assert {batch.sampling.height for batch in batches} == {16, 20} and len(batches) == 3 * size // 2
    targets, _ = one.targets.compute(rollout.plan, *one.score(rollout.plan))
    metrics = one.update(rollout.plan, batches, targets)
    groups = one.groups.groups_of(rollout.plan)
    compare(place, tmp_path, groups, name, metrics if name != "ipo" else None)


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("parallel", [{}, {"ulysses": 2}])
def test_the_first_gradient_of_two_processes(trainer, place, tmp_path, parallel):
    """Groups of four in batches of two, which lie on both processes; and with the tokens split over both, which leaves
    out the size with 15 tokens."""
    options = {"draws": 2, "times": "uniform"} | LOSSES["soft_dpo"][1]
    over = offline(place, "soft_dpo", 4, options=options, steps=1) | {"eval": {"every": 0}, "parallel": parallel}
    over["rollout"]["batch_size"] = 4 if parallel else 2
    alone = trainer(f"alone-{len(parallel)}", **over | {"parallel": {}})
    groups = alone.groups.groups_of(alone.groups.plan(0))
    file = recipe(place, f"two-{len(parallel)}", **over)
    all_end(ranks(file, 2, hook=dump_here, DUMP=str(tmp_path)))
    compare(place, tmp_path, groups, "soft_dpo", size=(16, 16) if parallel else None)


# ---- held-out pairs -------------------------------------------------------------------------------------------------


def test_the_accuracy_on_held_out_pairs(trainer, place):
    """Of groups of four with ties and pairs that nobody judged, against errors of the fp64 model."""
    over = offline(place, "soft_dpo", 4, options={"times": "uniform"})
    one = trainer(**over | {"eval": {"prompts": 0.2, "max_prompts": 3}})
    held = one.evaluators["dev"].pairs
    held.start(resumed=False)
    with torch.no_grad():
        for number, (name, p) in enumerate(one.policy.parameters.items()):
            if "lora_B" in name:
                p.copy_((torch.cos(torch.arange(p.numel()) + number) / 20).view_as(p))
    accuracy, margin = held.measure()
    oracle = Oracle(place, {name: p.detach() for name, p in one.policy.parameters.items()})
    margins = []
    for k, group in enumerate(one.source.held):
        reward = []
        with torch.no_grad():
            for sample in group.samples:
                at = (place, group.prompt.text, sample.file, HELD_OUT_GROUPS + k)
                gains = [
                    oracle.error(oracle.base, *at, draw, DRAWS) - oracle.error(oracle.policy, *at, draw, DRAWS)
                    for draw in range(DRAWS)
                ]
                reward.append(float(sum(gains)) / DRAWS)
        for i in range(4):
            for j in range(i):
                if group.wins[i, j] > 0.5:
                    margins.append(reward[i] - reward[j])
                elif group.wins[i, j] < 0.5:
                    margins.append(reward[j] - reward[i])
    assert len(margins) > 7 and min(map(abs, margins)) > 1e-5, "no pair whose order could be rounding"
    assert accuracy.value == np.mean([m > 0 for m in margins]) and 0 < accuracy.value < 1
    assert accuracy.interval.prompts == 3
    assert margin == pytest.approx(np.mean(margins), rel=1e-3)
    again, _ = held.measure()
    assert again == accuracy, "the same draws"


def test_a_file_of_held_out_pairs(trainer, place):
    """It is not trained on, and nothing else is held out; a file of prompts has no pairs to rank."""
    lines = (place / "pairs.jsonl").read_text().splitlines()
    (place / "test.jsonl").write_text("\n".join([*lines[:5], lines[0]]))
    one = trainer("file", **offline(place) | {"eval": {"prompts": str(place / "test.jsonl")}})
    assert len(one.source.held) == 6 and len(one.source.groups) == 24 and len(one.source.sets["dev"]) == 5
    assert any("5 of 5 evaluation prompts are in" in note for note in one.notes)
    one = trainer("prompts", **offline(place) | {"eval": {"prompts": str(place / "dev.txt")}})
    assert one.evaluators["dev"].pairs is None and len(one.source.groups) == 24 and len(one.source.sets["dev"]) == 3
    assert any("no pairs are held out" in note for note in one.notes)


def test_groups_of_a_step(trainer, place):
    """Every group once per epoch, whatever the number of processes; both members lie in one batch of one size."""
    one = trainer(**offline(place) | {"eval": {"every": 0}})
    seen = [group.prompt.text for step in range(8) for group in one.groups.groups_of(one.groups.plan(step))]
    assert len(set(seen)) == 24 and len(seen) == 24
    for step in range(2):
        plan = one.groups.plan(step)
        batches = list(one.groups.batches(plan, None))
        assert [batch.groups for batch in batches] == [(3 * step + slot,) * 2 for slot in range(3)]
        for batch, group in zip(batches, one.groups.groups_of(plan), strict=True):
            assert (batch.sampling.height, batch.sampling.width) == group.shapes[0][:2]
            assert batch.latents.shape == (2, *one.adapter.latent_shape(batch.sampling))
    assert one.groups.plan(0).scored == (), "nothing is scored"


# ---- edits, and guidance --------------------------------------------------------------------------------------------


def test_edits_are_trained_with_their_sources(tmp_path, place):
    """The source in the group's bucket is part of the condition; without it the loss is another one."""
    pipelines.make("flux_kontext", tmp_path / "kontext")
    rng = np.random.default_rng(1)
    found = []
    for k in range(4):
        row = {"prompt": f"edit {k}"}
        for name in ("chosen", "rejected", "source_image"):
            row[name] = str(tmp_path / f"{k}{name}.png")
            Image.fromarray(rng.integers(0, 256, (24, 40, 3), dtype=np.uint8)).save(row[name])
        found.append(row)
    (tmp_path / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    values = settings(place, "edits", **offline(place, steps=1) | {"eval": {"every": 0}})
    values |= {"model": str(tmp_path / "kontext"), "family": "flux_kontext", "output": str(tmp_path)}
    values["data"] |= {"pairs": str(tmp_path / "edits.jsonl")}
    one = Trainer(from_dict(values))
    batch = batches_of(one, 0)[0]
    (source,) = batch.condition.sources
    size = batch.sampling
    assert size.width > size.height and tuple(source.shape[1:3]) == one.adapter.grid(size)
    own = fit(Image.open(one.groups.plan(0).prompts[0].source[0]), (size.width, size.height))
    assert torch.equal(source[0], one.adapter.encode_source(own))
    result = one.train()
    assert [row["samples_trained"] for row in rows(result.folder)] == [6]


@pytest.mark.full
def test_clips_are_trained_from_their_first_frame(tmp_path, place):
    """Wan2.2-TI2V: the clip's latents have those of the source image in their first frame, as after a rollout."""
    pipelines.make("wan_ti2v", tmp_path / "model")
    rng = np.random.default_rng(1)
    row = {"prompt": "a ball rolls", "source_image": str(tmp_path / "s.png")}
    Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(row["source_image"])
    for name in ("chosen", "rejected"):
        row[name] = str(tmp_path / f"{name}.gif")
        imageio.imwrite(row[name], rng.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8), duration=1000 / 24)
    (tmp_path / "clips.jsonl").write_text(json.dumps(row) + "\n")
    values = settings(place, "clips", **offline(place, "soft_dpo", steps=2) | {"eval": {"every": 0}})
    values |= {"model": str(tmp_path / "model"), "family": "wan_ti2v", "output": str(tmp_path)}
    values["data"] |= {"pairs": str(tmp_path / "clips.jsonl")}
    values["rollout"] |= {"frames": 5, "height": 32, "width": 32, "prompts_per_step": 1}
    one = Trainer(from_dict(values))
    (batch,) = batches_of(one, 0)
    assert torch.equal(batch.latents[:, :, :1], batch.condition.sources[0].float())
    assert not torch.equal(batch.latents[0, :, 1:], batch.latents[1, :, 1:])
    result = one.train()
    assert [row["samples_trained"] for row in rows(result.folder)] == [2, 2]


def test_training_forwards_have_no_guidance(place):
    """Classifier-free guidance is for evaluation; guidance that the model takes as an input stays."""
    base = from_dict(settings(place, "guided", **offline(place)))
    of_family = {
        name: replace(base, family=name, rollout=replace(base.rollout, guidance=4.0))
        for name in ("flux", "sd3", "z_image", "wan")
    }
    assert {name: unguided(config).guidance for name, config in of_family.items()} == {
        "flux": 4.0, "sd3": 1.0, "z_image": 0.0, "wan": 1.0,
    }  # fmt: skip
    assert of_family["sd3"].eval_sampling.guidance == 4.0


# ---- mistakes -------------------------------------------------------------------------------------------------------


def test_rewards_need_not_be_left_out_by_hand(place):
    """The default judge is that of prompts; a recipe's own rewards are kept, and refused by name."""
    values = settings(place, "default", **offline(place))
    del values["rewards"]
    config = from_dict(values)
    assert config.rewards == () and from_dict(to_dict(config)) == config
    file = place / "default.yaml"
    file.write_text(yaml.safe_dump(values))
    one = Trainer.from_recipe(file, name="from_recipe")
    one.close()
    assert one.config.rewards == ()


def test_groups_of_another_size(trainer, place):
    with pytest.raises(DataError, match=r"rollout\.group_size: expected 4, as every group of .*groups\.jsonl has, got"):
        trainer(**merged(offline(place, "dpo", 4), {"rollout": {"group_size": 2, "batch_size": 2}}))
    lines = [(place / f"{name}.jsonl").read_text().splitlines()[0] for name in ("pairs", "groups", "pairs")]
    (place / "mixed.jsonl").write_text("\n".join(lines))
    over = merged(offline(place), {"data": {"pairs": str(place / "mixed.jsonl")}})
    with pytest.raises(DataError, match=r"line 2: 4 images or clips, expected rollout\.group_size = 2"):
        trainer(**over)

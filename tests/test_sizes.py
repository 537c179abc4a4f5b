"""Sizes and times: prompts of several sizes in one run, evaluation at another size, truncated timesteps.

Why these cases: a batch of mixed sizes cannot be stacked, and padding would be wrong; the time shift depends on the
size; ranks must share the work of large images evenly; the published trainers give the model integer timesteps; and an
evaluation at another size must not affect training.
"""

import json

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from families import CASES, case_of, folder, load
from tiny_run import ranks, recipe, rows, start, train, weights, world

from prefgrpo.config.loading import from_dict
from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.prompts import Prompt
from prefgrpo.rollout.assignment import assign_batches, slot_prompts
from prefgrpo.rollout.sampling import Schedules, prompt_sampling
from prefgrpo.run.evaluate import FIRST_ID
from prefgrpo.sde.noise import initial_latents
from prefgrpo.sde.schedule import make_schedule, shifted_sigmas, truncated_times

PUBLISHED = [1000, 976, 951, 923, 891, 857, 818, 774, 724, 666, 599, 521, 428, 315, 176]
"""Timesteps of the published trainers at 15 steps and shift 3."""
SIZES = [(16, 16), (24, 16), (16, 24)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = world(tmp_path_factory.mktemp("sizes"))
    lines = [{"prompt": f"a circle {k}", "height": SIZES[k % 3][0], "width": SIZES[k % 3][1]} for k in range(6)]
    (folder / "sized.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_truncated_times_are_the_published_ones():
    sigmas = shifted_sigmas(15, 3.0)  # in fp32 as in their code: 0.6 becomes 0.59999996, then 599
    times = truncated_times(sigmas)
    assert (times * 1000).round(decimals=3).tolist() == PUBLISHED
    schedule = make_schedule(sigmas, "flow", 0.7, times=times)
    assert torch.equal(schedule.times, times) and torch.equal(schedule.sigmas, sigmas)
    assert torch.equal(make_schedule(sigmas, "flow", 0.7).times, sigmas[:-1]), "truncated by default"


def own(prompts_per_step=8, updates=2, group_size=2):
    rollout = {"prompts_per_step": prompts_per_step, "group_size": group_size, "batch_size": 4}
    data, train = {"prompts": "p", "own_sizes": True}, {"updates_per_rollout": updates}
    return from_dict({"model": "m", "data": data, "rollout": rollout, "train": train})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_batches_have_one_size_and_ranks_share_the_large_ones(size):
    config = own()
    prompts = [Prompt(k, f"{k}", {"height": 16 if k % 2 else 64, "width": "16"}) for k in range(8)]
    slots = slot_prompts(config, prompts, 3)
    sizes = [s for _, s in slots]
    planned = assign_batches(config, sizes, size)
    places = [place for b in planned for place in b.places]
    assert sorted(places) == [(p, g) for p in range(8) for g in range(2)], "each sample exactly once"
    for b in planned:
        assert len({(sizes[p].height, sizes[p].width) for p, _ in b.places}) == 1 and len(b.places) <= 4
        assert {p * 2 // 8 for p, _ in b.places} == {b.update}
    pixels = [
        sum(sizes[p].height * sizes[p].width for b in planned if b.dp_rank == k for p, _ in b.places)
        for k in range(size)
    ]
    assert max(pixels) <= min(pixels) + 64 * 16 * 4, "ranks may differ by one large batch at most"
    assert sorted(p.id for p, _ in slots) == list(range(8))


def test_the_columns_are_read_only_where_asked():
    prompt = Prompt(0, "x", {"height": 64, "width": "32"})
    config = own()
    assert prompt_sampling(prompt, config.rollout, False) == config.rollout
    sized = prompt_sampling(prompt, config.rollout, True)
    assert (sized.height, sized.width) == (64, 32)
    assert prompt_sampling(Prompt(0, "x"), config.rollout, True) == config.rollout
    with pytest.raises(ValueError, match=r"'x': expected whole numbers above 0 for both height and width"):
        prompt_sampling(Prompt(0, "x", {"height": 64}), config.rollout, True)


def test_the_time_shift_follows_the_size():
    case = CASES[0]
    adapter = load(case, folder("flux"))
    config = own()
    schedules = Schedules(config, adapter, torch.device("cpu"))
    sizes = [
        prompt_sampling(Prompt(0, "x", {"height": h, "width": w}), config.rollout, True)
        for h, w in ((16, 16), (64, 64))
    ]
    small, large = (schedules.step(s, 0) for s in sizes)
    assert not torch.equal(small.sigmas, large.sigmas) and small.sde_steps == large.sde_steps
    for s, schedule in zip(sizes, (small, large), strict=True):
        assert torch.equal(schedule.sigmas, adapter.sigmas(s))


@pytest.mark.dist
def test_own_sizes_train_alike_on_any_number_of_ranks(place):
    over = {
        "data": {"prompts": str(place / "sized.jsonl"), "own_sizes": True},
        "rollout": {"prompts_per_step": 6, "group_size": 2, "batch_size": 4},
        "train": {"steps": 2, "updates_per_rollout": 1},
        "eval": {"every": 0},
    }
    found = []
    for size in (1, 2):
        file = recipe(place, f"own{size}", **over)
        if size == 1:
            code, output = train(file)
            assert code == 0 and "(exact)" in output, output
        else:
            runs = ranks(file, size)
            assert [run.wait() for run in runs] == [0] * size, runs[0].output
        found.append([r for r in rows(place / "runs" / f"own{size}") if r["kind"] == "train"])
    for one, two in zip(*found, strict=True):
        for key in ("reward/jpeg_compressibility", "grad_norm"):
            assert abs(one[key] - two[key]) <= 1e-4 * abs(one[key]), key


@pytest.mark.full
def test_evaluation_and_generation_at_another_size(place):
    over = {"height": 24, "width": 16, "steps": 5}
    plain = recipe(place, "plain", train={"steps": 2})
    file = recipe(place, "shown", train={"steps": 2}, eval=over)
    for trained in (plain, file):
        code, output = train(trained)
        assert code == 0, output
    runs = place / "runs"
    lora = [weights(runs / name / "lora") for name in ("plain", "shown")]
    assert lora[0] == lora[1], "evaluation changed the training"
    images = np.load(runs / "shown" / "eval" / "dev_000002.npz")
    assert images["now"].shape[1:] == (24, 16, 3)
    shown = json.loads((runs / "shown" / "eval" / "dev_prompts.json").read_text())
    pipe = FluxPipeline.from_pretrained(place / "flux")
    shape = load(case_of("flux"), place / "flux").latent_shape(SamplingConfig(24, 16, 5))
    latents = initial_latents(0, torch.tensor([FIRST_ID]), shape)
    call = {"height": 24, "width": 16, "num_inference_steps": 5, "guidance_scale": 3.5, "max_sequence_length": 24}
    stock = pipe(shown[0], latents=latents, output_type="np", **call).images
    assert np.abs(images["before"][:1] - 255 * stock).max() <= 1
    argv = ["generate", str(runs / "shown" / "config.yaml"), "--lora", str(runs / "shown"), "--samples", "1"]
    run = start([*argv, "--prompts", str(place / "sized.jsonl"), "--out", str(place / "one")], place / "g.log")
    assert run.wait() == 0, run.output
    run = start(
        [*argv, "--prompts", str(place / "sized.jsonl"), "--out", str(place / "own"), "--data.own-sizes", "true"],
        place / "g.log",
    )
    assert run.wait() == 0, run.output
    from PIL import Image

    made = [Image.open(place / "own" / f"{k:06d}_0.png").size for k in range(6)]
    assert made == [(w, h) for h, w in SIZES] * 2
    assert {Image.open(file).size for file in (place / "one").glob("*.png")} == {(16, 24)}

"""The commands `prefgrpo preprocess` and `prefgrpo generate`, on one process and on two.

Why these cases: encoding 50,000 prompts takes hours and may be killed halfway; two ranks must neither skip nor repeat a
prompt; an incomplete cache must be reported before the run starts; and a benchmark's files must not depend on the
number of ranks and must have the names that its scoring tools expect.
"""

import csv
import json
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image
from ranks import Hold, all_end, ranks, start, trained
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from world import PROMPTS, case_of, load, recipe, tiny_world, tree, weights

from prefgrpo import models
from prefgrpo.commands.generate import check_writing, make_jobs
from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.atomic import temporary_path
from prefgrpo.data.file_names import file_name
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.rollout import embedding_cache
from prefgrpo.run.opening import Weights
from prefgrpo.sde.noise import EVALUATION_IDS, initial_latents
from prefgrpo.tiny import pipelines


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tiny_world(tmp_path_factory.mktemp("generate"))
    pipelines.make("sd3", folder / "sd3")
    return folder


def command(*argv, code=0):
    """The output of a command that ends with this exit code."""
    run = start([str(a) for a in argv], argv[1].with_suffix(".log"))
    assert run.wait() == code and "Traceback" not in run.output, run.output
    return run.output


def images(folder):
    """{name: bytes} of the images in a folder."""
    return {name: content for name, content in tree(folder).items() if name.endswith(".png")}


def held(folder):
    """{key.tensor: values} over all shards in a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys(), "each unique prompt is written once"
        found |= tensors
    return found


def same(a, b):
    return a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a)


def test_an_unknown_family_is_told(place):
    file = recipe(place, "unknown", family="flx", data={"cache": str(place / "unknown")})
    assert "family: unknown family 'flx'" in command("preprocess", file, code=2)


@pytest.mark.full
def test_once_all_is_encoded_no_encoder_is_loaded(place):
    """The cache is the same when filled again, and a run from it the same as without one."""
    model, cache = pipelines.make("flux", place / "lean"), place / "cache"
    cached = {"model": str(model), "data": {"cache": str(cache)}, "train": {"steps": 1}}
    file = recipe(place, "cached", **cached)
    assert "10 texts and sources encoded now; all of 10 prompts are in" in command("preprocess", file)
    first = held(cache)
    assert len({key.partition(".")[0] for key in first}) == 10 and len(list(cache.iterdir())) == 1
    assert "0 texts and sources encoded now" in command("preprocess", file)
    next(cache.glob("*.safetensors")).unlink()
    assert "10 texts and sources encoded now" in command("preprocess", file)
    assert same(held(cache), first)
    assert "embeddings in" not in trained(recipe(place, "uncached", model=str(model), train={"steps": 1}))
    assert "no text encoder was loaded" in trained(file)
    lora = [load_file(place / "runs" / n / "lora" / "pytorch_lora_weights.safetensors") for n in ("cached", "uncached")]
    assert same(*lora)
    command("generate", file, "--lora", place / "runs/cached", "--out", place / "lean_out")
    (place / "more.txt").write_text("\n".join([*PROMPTS, "a text that nobody encoded"]))
    more = cached["data"] | {"prompts": str(place / "more.txt")}
    assert "1 entries are encoded now" in trained(recipe(place, "lean2", **cached | {"data": more}))
    assert len({key.partition(".")[0] for key in held(cache)}) == 11, "a run adds what it encodes"


def small_shards():
    """Runs in the new process: three entries per file."""
    real = embedding_cache.EmbeddingCache.add

    def add(self, *given):
        embedding_cache.SHARD_BYTES = 0 if len(self._new) == 2 else 2**40
        return real(self, *given)

    embedding_cache.EmbeddingCache.add = add


@pytest.mark.parametrize(("number", "call", "kept"), [(signal.SIGKILL, 2, 6), (signal.SIGINT, 1, 3)])
def test_a_preprocess_that_was_killed_or_interrupted_goes_on(place, number, call, kept):
    """The process is held while it writes a shard; after SIGINT it finishes that shard."""
    cache = place / f"stopped_{call}"
    file = recipe(place, f"stopped_{call}", data={"cache": str(cache)})
    hold = Hold("prefgrpo.rollout.embedding_cache:EmbeddingCache.flush", call=call)
    run = start(["preprocess", str(file)], file.with_suffix(".log"), small_shards, hold)
    run.until_held()
    os.kill(run.process.pid, number)
    code = run.wait()
    assert number == signal.SIGKILL or (code == 130 and run.output.endswith("interrupted\n")), run.output
    assert "Traceback" not in run.output
    (cache / ".x.partial").write_bytes(b"half a shard")
    before = held(cache)
    assert len({key.partition(".")[0] for key in before}) == kept
    assert f"{10 - kept} texts and sources encoded now" in command("preprocess", file)
    assert same({k: v for k, v in held(cache).items() if k in before}, before)


def test_edit_sources_are_encoded_once_per_image(place):
    pipelines.make("flux_kontext", place / "kontext")
    for name in "ab":
        noise = np.random.default_rng(ord(name)).integers(0, 256, (40, 24, 3), dtype=np.uint8)
        Image.fromarray(noise).save(place / f"{name}.png")
    edits = [{"instruction": f"make it {c}", "source_image": f"{n}.png"} for c in ("red", "blue", "odd") for n in "ab"]
    (place / "edits.jsonl").write_text("\n".join(map(json.dumps, edits)))
    over = {"family": "flux_kontext", "model": str(place / "kontext"), "eval": {"prompts": 0}}
    data = {"cache": str(place / "edits"), "prompts": str(place / "edits.jsonl")}
    file = recipe(place, "edits", data=data, **over)
    assert "5 texts and sources encoded now; all of 6 prompts" in command("preprocess", file)
    assert sum(key.endswith(".0") for key in held(place / "edits")) == 2
    assert "no text encoder was loaded" in trained(file, "--train.steps", "1")


@pytest.mark.full
@pytest.mark.dist
def test_two_ranks_encode_each_text_once(place):
    over = {"family": "sd3", "model": str(place / "sd3"), "rollout": {"guidance": 4.5}}
    found = []
    for size in (1, 2, 3):
        file = recipe(place, f"pre{size}", data={"cache": str(place / f"cache{size}")}, **over)
        runs = ranks(file, size, command="preprocess") if size > 1 else [start(["preprocess", str(file)], place / "l")]
        assert "11 texts and sources encoded now" in all_end(runs)[0], "ten prompts and the negative prompt"
        found.append(held(place / f"cache{size}"))
    assert same(*found[:2]) and same(*found[1:])


def rank_one_sees_every_file() -> None:
    """Runs in the new process: the disks of several machines may show different files."""
    if os.environ["RANK"] == "1":
        Path.exists = lambda self, **_: self.suffix == ".png" or os.path.exists(self)


@pytest.mark.dist
def test_generate_skips_what_is_there_and_does_not_depend_on_ranks(place):
    with (place / "bench.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["index", "prompt_en"], *([7 + k, p] for k, p in enumerate(PROMPTS[:3]))])
    file = recipe(place, "images")
    argv = ["--prompts", place / "bench.csv", "--samples", 2, "--naming", "unigenbench", "--out"]
    assert "6 files are in" in command("generate", file, *argv, place / "one")
    first = images(place / "one")
    assert sorted(first) == [f"{i}_{j}.png" for i in (7, 8, 9) for j in (0, 1)]
    pixels = [np.asarray(Image.open(place / "one" / name)) for name in sorted(first)]
    assert all(p.shape == (16, 16, 3) for p in pixels) and not any((pixels[0] == p).all() for p in pixels[1:])
    (place / "one" / "8_1.png").unlink()
    (place / "one" / "7_0.png").write_bytes(b"kept")
    assert "; 5 already existed and are unchanged" in command("generate", file, *argv, place / "one")
    assert images(place / "one") == first | {"7_0.png": b"kept"}
    all_end(ranks(file, 2, *map(str, argv), str(place / "two"), command="generate", hook=rank_one_sees_every_file))
    for name in first:
        a, b = np.asarray(Image.open(place / "two" / name)).astype(int), pixels[sorted(first).index(name)].astype(int)
        assert abs(a - b).max() <= 1


def test_generate_from_a_run_and_with_a_lora(place):
    """A run's newest checkpoint and its exported LoRA give equal images; a folder keeps those of one policy."""
    trained(recipe(place, "trained", train={"steps": 2}))
    run = place / "runs" / "trained"
    file = run / "config.yaml"
    argv = ["--samples", 1, "--prompts", place / "dev.txt", "--out"]
    for name, target, options in (("base", file, []), ("lora", file, ["--lora", run / "lora"]), ("run", run, [])):
        command("generate", target, *argv, place / name, *options)
    assert sorted(images(place / "run")) == [f"{i:06d}_0.png" for i in range(3)]
    assert images(place / "run") == images(place / "lora") != images(place / "base")
    before = tree(place / "run")
    assert "files that were made differently (other: weights" in command("generate", file, *argv, place / "run", code=2)
    assert tree(place / "run") == before
    name = "pytorch_lora_weights.safetensors"
    with safe_open(place / "runs/trained/lora" / name, "pt") as lora:
        wider = {k: torch.cat([lora.get_tensor(k)] * 2, int("lora_A" in k)) for k in lora.keys()}  # noqa: SIM118
        (place / "wider").mkdir()
        save_file(wider, place / "wider" / name, lora.metadata())
    output = command("generate", file, *argv, place / "none", "--lora", place / "wider", code=2)
    assert f"it does not fit {place / 'flux'}" in output, output
    (place / "twice.txt").write_text(f"{PROMPTS[0]}\n{PROMPTS[0]}\n")
    argv = ["--samples", 1, "--naming", "vbench", "--prompts", place / "twice.txt", "--out", place / "twice"]
    assert "1 files are in" in command("generate", file, *argv) and len(images(place / "twice")) == 1


def test_every_sample_has_noise_of_its_own():
    """Which does not change when more samples of a prompt are asked for."""
    prompts = [Prompt(k, f"a {k}") for k in range(5)]

    def noise(samples):
        jobs = make_jobs((p, j, Path(f"{p.id}_{j}")) for p in prompts for j in range(samples))
        return {job.file: job.noise for job in jobs}

    few = noise(3)
    many = noise(9)
    assert len(set(many.values())) == len(many) == 45 and max(many.values()) < EVALUATION_IDS
    assert few.items() < many.items()


def test_what_shares_a_name(monkeypatch):
    """Equal prompts may share a clip, but not those that are cut to one name, or edits of different images. Processes
    of two machines do not share a temporary name, though in containers they often have the same id."""
    long = "a cat " * 60
    for first, second in ((Prompt(0, long), Prompt(1, long + "asleep")), (Prompt(0, "x"), Prompt(1, "x", {}, ("a",)))):
        places = [(p, 0, Path(file_name(p, 0, "vbench", ".mp4"))) for p in (first, second)]
        with pytest.raises(DataError, match="prompts 1 and 2 share the file"):
            make_jobs(places, shared=True)
        assert len(make_jobs([places[0], (replace(first, id=1), 0, places[0][2])], shared=True)) == 1
    names = set()
    for host in ("a", "b"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names.add(temporary_path(Path("x")))
    assert len(names) == 2


PUBLISHED_RATES = {
    "wan": 16, "wan22": 16, "wan_i2v": 16, "wan22_i2v": 16, "wan_ti2v": 24,  # Wan's sample_fps
    "hunyuan_video": 24, "hunyuan_video_15": 24,  # Tencent's sample scripts
    "ltx2": 24,  # diffusers' default frame_rate
}  # fmt: skip


@pytest.mark.parametrize("name", models.MODELS)
def test_clips_have_the_frame_rate_of_the_published_model_unless_given(name):
    config = from_dict({"family": name, "model": "m", "data": {"prompts": "p"}})
    published = PUBLISHED_RATES.get(name)
    assert Weights(config).frame_rate(None) == published
    assert Weights(config).frame_rate(12.5) == (published and 12.5)
    assert Weights(config).facts([], None)["fps"] == published


@pytest.mark.parametrize("fps", [0, 0.5, -1, 1000, float("nan")])
def test_a_frame_rate_that_no_file_has_is_refused(fps, tmp_path):
    config = from_dict({"family": "wan", "model": "m", "data": {"prompts": "p"}})
    with pytest.raises(ConfigError, match="--fps: expected 1 to 240, got"):
        check_writing(config, tmp_path / "out", 1, fps)


def test_odd_sizes_are_refused_before_anything_is_generated(tmp_path):
    """x264 writes a file without frames for them."""
    config = from_dict({"family": "wan", "model": "m", "data": {"prompts": "p"}, "eval": {"height": 31, "width": 32}})
    with pytest.raises(ConfigError, match=r"even numbers, as mp4 files have .*, got 31 × 32"):
        check_writing(config, tmp_path / "out", 1, None)
    check_writing(replace(config, rollout=replace(config.rollout, frames=1)), tmp_path / "out", 1, None)


def test_a_lora_file_that_changed_is_another_lora(place):
    config = from_dict({"model": str(place / "flux"), "data": {"prompts": str(place / "dev.txt")}})
    file = place / "some.safetensors"
    written = []
    for time in (1, 2):
        file.touch()
        os.utime(file, (time, time))
        written += [Weights(config, str(where), where).facts([], 16)["written"] for where in (file, file.parent)]
    assert written[0] != written[2]
    longer = replace(config, data=replace(config.data, max_length=7))
    assert [Weights(c, "a").facts([], 16)["max_length"] for c in (config, longer)] == [config.data.max_length, 7]


@pytest.mark.full
def test_evaluation_and_generation_at_another_size(place):
    over = {"height": 24, "width": 16, "steps": 5}
    plain = recipe(place, "plain", train={"steps": 2})
    file = recipe(place, "shown", train={"steps": 2}, eval=over)
    for one in (plain, file):
        trained(one)
    runs = place / "runs"
    lora = [weights(runs / name / "lora") for name in ("plain", "shown")]
    assert lora[0] == lora[1], "evaluation changed the training"
    images = np.load(runs / "shown" / "eval" / "dev_000002.npz")
    assert images["now"].shape[1:] == (24, 16, 3)
    shown = json.loads((runs / "shown" / "eval" / "dev_prompts.json").read_text())
    pipe = FluxPipeline.from_pretrained(place / "flux")
    shape = load(case_of("flux"), place / "flux").latent_shape(SamplingConfig(24, 16, 5))
    latents = initial_latents(0, torch.tensor([EVALUATION_IDS]), shape)
    call = {"height": 24, "width": 16, "num_inference_steps": 5, "guidance_scale": 3.5, "max_sequence_length": 24}
    stock = pipe(shown[0], latents=latents, output_type="np", **call).images
    assert np.abs(images["before"][:1] - 255 * stock).max() <= 1
    argv = ["generate", runs / "shown" / "config.yaml", "--lora", runs / "shown", "--samples", 1]
    command(*argv, "--prompts", place / "dev.txt", "--out", place / "sized")
    assert {Image.open(file).size for file in (place / "sized").glob("*.png")} == {(16, 24)}

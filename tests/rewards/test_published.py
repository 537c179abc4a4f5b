"""Rewards with the options of a publication, compared with that publication's own functions.

Why these cases: each option changes a number that differs by default (file sizes, resizing, JPEG compression on the way
to a server, spellings of Yes, a hard verdict), so a recipe that reproduces the publication must set it. Oracle: the
peers' code on the same random images and, for judges, the same server (skipped without PREFGRPO_PEERS); and always the
published formula in plain Pillow or torchvision.
"""

import asyncio
import io
import json
import math
import pickle
import sys
import urllib.request
from types import MappingProxyType, ModuleType, SimpleNamespace

import numpy as np
import peers
import pytest
import torch
from PIL import Image
from reward_cases import clip_folder
from servers import JudgeServer, judge, serving
from transformers import CLIPModel, CLIPProcessor

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.rewards import RewardSpecError, build
from prefgrpo.rewards.base import Reward, Sample
from prefgrpo.rewards.prepared import PreprocessedReward

SIZE = "jpeg_compressibility"
PACO = {"spellings": "exact", "jpeg": 75}


def noise(seed, high=96, wide=64):
    """An image in which resizing and JPEG compression change every pixel."""
    return Media(np.random.default_rng(seed).integers(0, 256, (high, wide, 3), np.uint8))


def jpeg75(media):
    """Pillow's default: quality 75, 4:2:0."""
    buffer = io.BytesIO()
    media.pil.save(buffer, format="JPEG")
    return np.asarray(Image.open(buffer))


def values(name, samples, **options):
    return [s.value for s in build(name, {name: options})[name].score(samples)]


def apart(ours, theirs):
    return float(np.abs(np.subtract(ours, theirs)).max())


class Seen(Reward):
    """Records the samples that it is given."""

    takes = ("image", "video")
    answer_s = 900.0
    part_weights = MappingProxyType({"a": 0.5})

    def __init__(self, scale: float = 1.0):
        self.samples, self.scale = [], scale

    def ask(self, asked):
        samples = [sample for (sample,) in asked]
        self.samples += samples
        return [Answer(self.scale * float(s.media.pixels.mean())) for s in samples]


def seen(**options):
    name = f"{__name__}:Seen"
    return build([name], {name: options})[name]


# Preprocessing of images before a reward sees them


def test_a_jpeg_round_trip_is_pillows_and_reaches_every_frame_and_source():
    clip = Media(np.stack([noise(k).pixels for k in range(3)]))
    reward = seen(jpeg=75, scale=2.0)
    samples = [Sample("a", noise(0), (noise(1),)), Sample("a", clip)]
    scores = reward.score(samples)
    first, second = reward.reward.samples
    np.testing.assert_array_equal(first.media.pixels, jpeg75(noise(0)))
    np.testing.assert_array_equal(first.source[0].pixels, jpeg75(noise(1)))
    np.testing.assert_array_equal(second.media.pixels, np.stack([jpeg75(noise(k)) for k in range(3)]))
    assert scores[0].value == 2 * jpeg75(noise(0)).mean() != 2 * noise(0).pixels.mean()
    again = seen(jpeg=75)
    again.score(samples[:1])
    assert again.reward.samples[0].media is first.media, "rewards with equal options must share the image"
    empty = build([SIZE], {SIZE: {"jpeg": 75}})[SIZE].score([Sample("a", Media(np.zeros((0, 4, 3), np.uint8)))])
    assert empty[0].value is None and "no pixels" in empty[0].reason


def test_size_is_pillows_resize_and_wrong_values_are_refused():
    reward = seen(size=32)
    assert (reward.answer_s, reward.part_weights) == (Seen.answer_s, Seen.part_weights), "the run reads these from it"
    reward.score([Sample("a", noise(0))])
    np.testing.assert_array_equal(reward.reward.samples[0].media.pixels, np.asarray(noise(0).pil.resize((32, 32))))
    for options in ({"jpeg": 101}, {"size": -1}, {"jpeg": "75"}):
        with pytest.raises(RewardSpecError, match=f"option '{next(iter(options))}' of reward .*: Input should be"):
            seen(**options)
    with pytest.raises(RewardSpecError, match=r"has no option 'jpg' \(did you mean 'jpeg'"):
        seen(jpg=75)


def test_all_that_a_reward_declares_is_seen_through_its_preprocessing():
    """Whatever the run, the scorer or a server asks of it, today or later: every attribute that `Reward` has."""

    class Other(Seen):
        frames = 3
        needs_source = True
        meta_keys = ("a",)
        reads = ("b",)
        judged = True
        of_function = True
        kinds = ("Alignment",)
        compares = True
        is_win_rate = True
        template = "compare"
        probe = MappingProxyType({"prompt": "x"})
        streams = True
        batch_size = 4

        def close(self):
            """Its own."""

    names = [name for name in vars(Reward) if not name.startswith("_") and not callable(getattr(Reward, name))]
    made = Other()
    wrapped = PreprocessedReward(lambda: made, size=32)
    assert {"takes", "frames", "part_weights"} <= set(names)
    for name in [*names, "close"]:
        assert getattr(made, name) != getattr(Reward, name), f"{name}: this test must set it"
        assert getattr(wrapped, name) == getattr(made, name), name


def test_pictures_are_changed_on_either_side_of_http():
    samples = [Sample("", noise(k)) for k in range(2)]
    expected = values(SIZE, [Sample("", Media(jpeg75(noise(k)))) for k in range(2)])
    assert values(SIZE, samples, jpeg=75) == expected != values(SIZE, samples)
    with serving(SIZE, {"jpeg": 75}) as url:
        assert values(SIZE, samples, url=url) == expected
    with serving(SIZE, {}) as url:
        assert values(SIZE, samples, url=url, jpeg=75) == expected


# In process: JPEG size, CLIP


def test_compressibility_is_minus_the_size_of_pillows_file():
    samples, buffers = [Sample("a", noise(k)) for k in range(3)], [io.BytesIO() for _ in range(3)]
    for sample, buffer in zip(samples, buffers, strict=True):
        sample.media.pil.save(buffer, "JPEG", quality=95)
    sizes = [len(buffer.getvalue()) / 1000 for buffer in buffers]
    assert values("jpeg_incompressibility", samples) == sizes == [-v for v in values(SIZE, samples)]
    assert values(SIZE, samples, divisor=500) == [-v / 500 for v in sizes]


def test_compressibility_is_flow_grpos(monkeypatch):
    theirs = peers.file_module("flow_grpo", "flow_grpo/rewards.py", "published_flow_grpo", monkeypatch)
    pictures = [noise(k, 64 + 8 * k, 80) for k in range(4)]
    expected = [theirs.jpeg_compressibility()([m.pixels], [""], [{}])[0][0] for m in pictures]
    samples = [Sample("", m) for m in pictures]
    assert values(SIZE, samples, divisor=500) == pytest.approx(expected, rel=1e-15)
    print(f"{SIZE}: by default {values(SIZE, samples)[0] / expected[0]:g} times theirs")


@pytest.fixture(params=[("flow_grpo", "flow_grpo"), ("paco", "paco_grpo/rewards")], ids=["flow_grpo", "paco"])
def clip(request, tmp_path, monkeypatch):
    """(folder of a tiny CLIPModel, the peer's scorer with it). Before transformers 5, image features were a tensor."""
    folder, (peer, place) = clip_folder(tmp_path / "clip"), request.param
    theirs = peers.file_module(peer, f"{place}/clip_scorer.py", "published_clip_scorer", monkeypatch)

    class Model(CLIPModel):
        def get_image_features(self, **inputs):
            vectors = super().get_image_features(**inputs).pooler_output
            vectors.pooler_output = vectors  # read by the library's own forward
            return vectors

    for name, kind in (("CLIPModel", Model), ("CLIPProcessor", CLIPProcessor)):
        loader = SimpleNamespace(from_pretrained=lambda _, kind=kind: kind.from_pretrained(folder))
        monkeypatch.setattr(theirs, name, loader)
    return str(folder), theirs.ClipScorer("cpu")


def floats(media):
    return torch.stack([torch.from_numpy(m.pixels).permute(2, 0, 1) / 255.0 for m in media])


def test_clipscore_and_image_similarity_are_the_peers(clip):
    folder, scorer = clip
    media, sources = [noise(k) for k in range(6)], [noise(10 + k) for k in range(6)]
    prompts = ["a red cat", "two dogs on a hill", "", "a", "x " * 100, "b"]
    samples = [Sample(p, m, (s,)) for p, m, s in zip(prompts, media, sources, strict=True)]
    expected = {"clipscore": scorer(floats(media), prompts).tolist()}
    expected["image_similarity"] = scorer.image_similarity(floats(media), floats(sources)).tolist()
    for name, theirs in expected.items():
        assert values(name, samples, model=folder, resize="bilinear") == pytest.approx(theirs, abs=3e-6), name
        off = apart(values(name, samples, model=folder), theirs)
        print(f"{name}: by default off by {off:.2g}")
        assert off > 1e-3, f"{name}: the default gives the same, so the option is untested"


def test_sources_are_squares_as_in_the_peers_edit_trainers(clip):
    """Both peers resize a source to the training resolution before the model and the reward see it."""
    folder, scorer = clip
    media, sources = [noise(k, 64, 64) for k in range(4)], [noise(10 + k, 96, 64) for k in range(4)]
    squares = [Media(np.asarray(s.pil.resize((64, 64)))) for s in sources]
    expected = scorer.image_similarity(floats(media), floats(squares)).tolist()
    samples = [Sample("", m, (s,)) for m, s in zip(media, sources, strict=True)]
    options = {"model": folder, "resize": "bilinear"}
    assert values("image_similarity", samples, size=64, **options) == pytest.approx(expected, abs=3e-6)
    assert apart(values("image_similarity", samples, **options), expected) > 1e-3


@pytest.mark.parametrize("function", ["deqa_score_remote", "geneval_score"])
def test_what_flow_grpo_sends_to_its_servers_is_jpeg_75(function, monkeypatch):
    """Runs its client with a stubbed connection: the images it sends decode to those that our rewards see."""
    theirs = peers.file_module("flow_grpo", "flow_grpo/rewards.py", "published_flow_grpo", monkeypatch)
    sent = []

    def post(self, url, data, timeout):
        files = pickle.loads(data)["images"]
        sent.extend(np.asarray(Image.open(io.BytesIO(file))) for file in files)
        reply = {key: [0.0] * len(files) for key in ("outputs", "scores", "rewards", "strict_rewards")}
        reply |= {"group_strict_rewards": {}, "group_rewards": {}}
        return SimpleNamespace(content=pickle.dumps(reply))

    monkeypatch.setattr("requests.Session.post", post)
    media = [noise(k) for k in range(3)]
    asks = getattr(theirs, function)("cpu")
    asks(np.stack([m.pixels for m in media]), [""] * 3, [{}] * 3, *([True] if function == "geneval_score" else []))
    reward = seen(jpeg=75)
    reward.score([Sample("", m) for m in media])
    for theirs_pixels, ours in zip(sent, reward.reward.samples, strict=True):
        np.testing.assert_array_equal(theirs_pixels, ours.media.pixels)


# Rewards that ask a judge: the peer's scorer and ours with the same server


class Client:
    """The part of openai's client that the peers call, connected to a test server."""

    def __init__(self, server=None, **_):
        self.server = server or Client.default
        self.chat = self.completions = self

    async def create(self, model, timeout=None, **fields):
        body = json.dumps({"model": JudgeServer.model, **fields}).encode()
        request = urllib.request.Request(
            f"{self.server.url}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        said = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=600).read())
        reply = json.loads(said)
        choice = reply["choices"][0]
        if choice["logprobs"]:  # the server's text is not the likeliest token
            top = choice["logprobs"]["content"][0]["top_logprobs"]
            choice["message"]["content"] = max(top, key=lambda token: token["logprob"])["token"]
        return json.loads(json.dumps(reply), object_hook=lambda value: SimpleNamespace(**value))


@pytest.fixture
def server(monkeypatch):
    openai = ModuleType("openai")
    openai.OpenAI = openai.AsyncOpenAI = Client
    openai.ChatCompletion = object
    monkeypatch.setitem(sys.modules, "openai", openai)
    with JudgeServer() as running:
        Client.default = running
        yield running


def paco(name, monkeypatch):
    """Imports a module of PaCo-RL's rewards and restores the root logger's level, which the import changes."""
    import logging

    level = logging.getLogger().level
    try:
        return peers.module("paco", f"paco_grpo.rewards.{name}", monkeypatch)
    finally:
        logging.getLogger().setLevel(level)


def spelled(b, text):
    """Probability of each spelling, from the last digits of the brightness, so any other image encoding shows."""
    x = sum(1000 * value * (k + 1) for k, value in enumerate(b))
    yes, other = 0.1 + 0.6 * (x % 1), 0.05 + 0.1 * (7 * x % 1)
    found = {"Yes": yes, "yes": other, " Yes": 0.01, "No": 0.8 - yes, "no": 0.15 - other}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def ours(server, name, samples, image_format="png", **options):
    return values(name, samples, judge=judge(server, image_format=image_format), **options)


def test_consistency_is_pacos(server, monkeypatch):
    """Grey images, because PaCo-RL compresses each cell but `jpeg` the whole grid, where colours bleed one pixel into
    the next cell; brightness does not if the cells' sides are multiples of 8."""
    theirs = paco("consistency_scorer", monkeypatch)
    server.answer = spelled
    prompt = "FOUR-PANEL Images with a 2x2 grid layout. Warm light. [TOP]-[LEFT]:A cat. [TOP]-[RIGHT]:A dog."
    meta = {"criteria": {"Identity": {"a": "same cat"}, "Style": {"a": "same style", "b": "same light"}}}
    grey = np.random.default_rng(0).integers(0, 256, (6, 128, 128, 1), np.uint8).repeat(3, 3)
    samples = [Sample(prompt, Media(pixels), (), meta) for pixels in grey]
    scorer = theirs.ConsistencyScorer(client=Client(server))
    expected = scorer([s.media.pil for s in samples], [prompt] * 6, [meta] * 6)
    found = ours(server, "consistency_score", samples, **PACO)
    assert found == pytest.approx(expected, abs=1e-6)
    print(f"consistency_score: by default off by {apart(ours(server, 'consistency_score', samples), expected):.2g}")


def test_consistency_for_editing_is_pacos(server, monkeypatch):
    theirs = paco("consistency_for_editing", monkeypatch)
    server.answer = spelled
    samples = [Sample("add a hat", noise(k), (noise(10 + k),)) for k in range(6)]
    scorer = theirs.ConsistencyScorerForEditing(client=Client(server))
    metas = [{"ref_image": s.source[0].pil} for s in samples]
    expected = scorer([s.media.pil for s in samples], ["add a hat"] * 6, metas)
    found = ours(server, "consistency_for_editing", samples, **PACO)
    assert found == pytest.approx(expected, abs=1e-6)
    for more in ({}, {"spellings": "exact"}, {"jpeg": 75}):
        off = apart(ours(server, "consistency_for_editing", samples, **more), expected)
        print(f"consistency_for_editing {more}: off by {off:.2g}")
        assert off > 1e-3


def test_exact_spellings_by_hand(server):
    said = {"Yes": 0.3, " yes": 0.3, "No": 0.35, "Well": 0.05}
    server.answer = lambda b, text: said
    sample = Sample("a 2x2 grid", noise(0), (noise(1),))
    for name in ("consistency_score", "consistency_for_editing"):
        assert ours(server, name, [sample]) == pytest.approx([0.6 / 0.95])
        assert ours(server, name, [sample], spellings="exact") == pytest.approx([0.3 / 0.65])


def test_unifiedreward_sees_flow_grpos_512_squares(server, monkeypatch):
    theirs = peers.file_module("flow_grpo", "flow_grpo/rewards.py", "published_flow_grpo", monkeypatch)
    server.answer = lambda b, text: f"Final Score: {1 + 4 * (1000 * b[0] % 1):.6f}"
    media = [noise(k, 720, 640) for k in range(3)]
    expected, _ = theirs.unifiedreward_score_sglang("cpu")(np.stack([m.pixels for m in media]), ["a"] * 3, [{}] * 3)
    samples = [Sample("a", m) for m in media]
    assert ours(server, "unifiedreward_sglang", samples, size=512) == pytest.approx(expected, abs=1e-9)
    for more in ({}, {"size": 512, "image_format": "jpeg"}):
        assert ours(server, "unifiedreward_sglang", samples, **more) != pytest.approx(expected, abs=1e-3)


def test_grids_and_their_texts_are_pacos_on_its_own_prompts(server, monkeypatch):
    """Layout, theme and cell texts of every prompt in PaCo-RL's T2IS set, ignoring a closing quote at the end, which
    PaCo-RL drops."""
    from prefgrpo.rewards.simple import grid_of, sub_prompts

    utils = peers.module("paco", "paco_grpo.utils", monkeypatch)
    files = sorted((peers.folder("paco") / "dataset" / "T2IS").rglob("*.jsonl"))
    prompts = {json.loads(line)["prompt"] for file in files for line in file.read_text().splitlines()}
    assert len(prompts) > 100
    for prompt in prompts:
        theme, cells = sub_prompts(prompt)
        assert grid_of(prompt, {}) == utils.extract_grid_info(prompt)
        expected = [part.strip(' ".') for part in utils.divide_prompt(prompt)]
        assert [part.strip(' ".') for part in (theme, *cells)] == expected


def test_p_yes_of_random_answers_is_pacos(server, monkeypatch):
    """With all spellings and with the labels alone: PaCo-RL's own function on 200 random lists of probabilities."""
    from prefgrpo.judge.answers import label_logprobs

    utils = peers.module("paco", "paco_grpo.utils", monkeypatch)
    rng = np.random.default_rng(0)
    tokens = ["Yes", "No", "yes", " Yes", "YES", "no", " No", "NO", "Well", "The"]
    for _ in range(200):
        p = rng.dirichlet(np.full(len(tokens), 0.5))
        top = [{"token": t, "logprob": math.log(x)} for t, x in zip(tokens, p, strict=True)]
        choice = {"logprobs": {"content": [{"top_logprobs": top}]}}
        completion = json.loads(json.dumps({"choices": [choice]}), object_hook=lambda value: SimpleNamespace(**value))
        for every in (None, True):
            first, second = label_logprobs(choice, ("Yes", "No"), every)
            expected = utils.get_yes_cond_prob_from_completion(completion, canonicalize=bool(every))
            assert 1 / (1 + math.exp(second - first)) == pytest.approx(expected, rel=1e-9)

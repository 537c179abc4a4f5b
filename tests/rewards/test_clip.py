"""The CLIP family: aesthetic, clip, hpsv2, pickscore, clipscore, image_similarity, subfig_*.

Oracle: the libraries' own forward on the same tiny checkpoints, loaded through the libraries' own entry points; for the
head, plain float64 NumPy. Also tested: a wrong checkpoint, a missing library, a bad image, a hostile prompt, each of
which gives silently wrong rewards in other code.
"""

import json
import os
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from reward_cases import (
    GRID,
    MAKERS,
    SIZE,
    architecture,
    clip_folder,
    edits,
    grids,
    open_clip_folder,
    picture,
    pictures,
)
from safetensors.torch import load_file, save_file
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as vision
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

from prefgrpo.data.media import Media
from prefgrpo.rewards import build
from prefgrpo.rewards.base import RewardError, Sample
from prefgrpo.rewards.clip import Clip, Hpsv2
from prefgrpo.rewards.simple import split

PUBLIC_HEAD = "PREFGRPO_AESTHETIC_HEAD"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{reward: options}; every checkpoint is made once."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}


@pytest.fixture
def reward(made):
    def open_one(name, **options):
        return build(name, {name: made[name] | options})[name]

    return open_one


def values(reward, samples):
    scores = reward.score(samples)
    assert [s.reason for s in scores if s.value is None] == []
    return [s.value for s in scores]


def by_open_clip(folder, media, texts):
    """Normalised image and text vectors by open_clip alone."""
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(texts)
    with torch.no_grad():
        image, text, _ = model.eval()(torch.stack([preprocess(m.pil) for m in media]), tokens)
    return image, text


def by_transformers(folder, media, texts):
    """The complete output of CLIPModel, by transformers alone."""
    processor = CLIPProcessor(CLIPImageProcessorPil.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder))
    inputs = processor(text=texts, images=[m.pil for m in media], padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        return CLIPModel.from_pretrained(folder).eval()(**inputs)


def media_and_texts(samples):
    return [s.media for s in samples], [s.prompt for s in samples]


# Formulas


def test_clip_as_published_puts_the_weights_into_another_architecture(tmp_path, made):
    """Pref-GRPO loads DFN5B's weights (378 pixels, QuickGELU, squash) into open_clip's ViT-H-14 (224, GELU, crop). The
    oracle calls open_clip as it does, with a larger tiny checkpoint and a smaller tiny architecture."""
    tiny = architecture(quick_gelu=False)
    (tmp_path / "tiny-H-14.json").write_text(json.dumps(tiny))
    open_clip.add_model_config(tmp_path)
    folder = open_clip_folder(tmp_path / "dfn", size=3 * SIZE // 2)
    pretrained = str(folder / "open_clip_pytorch_model.bin")
    model, _, preprocess = open_clip.create_model_and_transforms("tiny-H-14", pretrained=pretrained)
    tokenize = open_clip.get_tokenizer("tiny-H-14")
    samples = [*pictures(), Sample("tall", picture(4, 64, 24))]
    media, texts = media_and_texts(samples)
    with torch.no_grad():
        image, text, _ = model.eval()(torch.stack([preprocess(m.pil) for m in media]), tokenize(texts))
    published = build("clip", {"clip": {"model": str(folder), "architecture": "tiny-H-14"}})["clip"]
    np.testing.assert_allclose(values(published, samples), (image * text).sum(-1), atol=2e-6)
    own = build("clip", {"clip": {"model": str(folder), "architecture": "checkpoint"}})["clip"]
    image, text = by_open_clip(folder, media, texts)
    np.testing.assert_allclose(values(own, samples), (image * text).sum(-1), atol=2e-6)
    assert np.abs(np.subtract(values(own, samples), values(published, samples))).min() > 1e-3
    assert Clip.architecture == Hpsv2.architecture == "ViT-H-14", "as published, without an option"


def test_no_architecture_is_guessed(made, tmp_path):
    folder = open_clip_folder(tmp_path / "dfn")
    (tmp_path / "wide.json").write_text(json.dumps(architecture() | {"embed_dim": 32}))
    open_clip.add_model_config(tmp_path / "wide.json")
    with pytest.raises(RewardError, match=r"cannot load '.* as wide'"):
        build("clip", {"clip": {"model": str(folder), "architecture": "wide"}})["clip"]
    (folder / "open_clip_config.json").unlink()
    with pytest.raises(RewardError, match=r"has no open_clip_config.json.* option `architecture`"):
        build("clip", {"clip": {"model": str(folder), "architecture": "checkpoint"}})["clip"]


def test_hpsv2_is_the_cosine_under_the_checkpoints_state_dict(made, reward):
    """As in the hpsv2 package, images are padded to a square in float; the oracle uses torchvision."""
    folder = Path(made["hpsv2"]["model"])
    model = open_clip.create_model(f"local-dir:{folder}", load_weights=False).eval()
    model.load_state_dict(torch.load(folder / "HPS_v2.1_compressed.pt", weights_only=True)["state_dict"])
    tokenize = open_clip.get_tokenizer(f"local-dir:{folder}")
    samples = [*pictures(), Sample("tall", picture(4, 64, 24)), Sample("square", picture(5, 48, 48))]
    expected = []
    for sample in samples:
        pixels = vision.to_tensor(sample.media.pil)
        scale = SIZE / max(pixels.shape)
        pixels = vision.resize(pixels, [round(n * scale) for n in pixels.shape[1:]], InterpolationMode.BICUBIC)
        left, top = ((SIZE - n) // 2 for n in (pixels.shape[2], pixels.shape[1]))
        pixels = vision.pad(pixels, [left, top, SIZE - left - pixels.shape[2], SIZE - top - pixels.shape[1]])
        pixels = vision.normalize(pixels, open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
        with torch.no_grad():
            image, text, _ = model(pixels[None], tokenize([sample.prompt]))
        expected.append(float(image[0] @ text[0]))
    np.testing.assert_allclose(values(reward("hpsv2"), samples), expected, atol=1e-6)


def test_pickscore_and_clipscore_are_transformers_logits(made, reward):
    for name, options, divide in (
        ("pickscore", {}, None), ("pickscore", {"scale": "logit"}, 26), ("clipscore", {}, 30),
    ):  # fmt: skip
        out = by_transformers(made[name]["model"], *media_and_texts(pictures()))
        cosine = (out.image_embeds * out.text_embeds).sum(-1)
        expected = out.logits_per_image.diag() / divide if divide else cosine
        np.testing.assert_allclose(values(reward(name, **options), pictures()), expected, rtol=2e-5, atol=2e-6)


def head_by_hand(file, vectors):
    x = np.asarray(vectors, np.float64)
    weights = torch.load(file, map_location="cpu", weights_only=True)
    for k in (0, 2, 4, 6, 7):
        x = x @ weights[f"layers.{k}.weight"].double().numpy().T + weights[f"layers.{k}.bias"].double().numpy()
    return x[:, 0]


def test_aesthetic_is_the_linear_head_on_the_unit_vector(made, reward, root):
    """With random weights, and with the published ones if the file is available."""
    options = made["aesthetic"]
    vectors = by_transformers(options["model"], *media_and_texts(pictures())).image_embeds
    public = Path(os.environ.get(PUBLIC_HEAD, root.parent / "shared" / "data" / "sac+logos+ava1-l14-linearMSE.pth"))
    for head in [options["head"], *[str(public)] * public.is_file()]:
        found = values(reward("aesthetic", head=head), pictures())
        np.testing.assert_allclose(found, head_by_hand(head, vectors), rtol=1e-5)


def test_image_similarity_is_the_mean_cosine_with_the_sources(made, reward):
    everything = [picture(k) for k in (0, 1, 2, 8, 9)]
    e = by_transformers(made["image_similarity"]["model"], everything, ["x"]).image_embeds.double().numpy()
    expected = [e[0] @ e[3], e[1] @ e[3], (e[2] @ e[3] + e[2] @ e[4]) / 2]
    np.testing.assert_allclose(values(reward("image_similarity"), edits()), expected, atol=2e-6)
    (alone,) = reward("image_similarity").score([Sample("add a hat", picture(0))])
    assert alone.value is None and "source" in alone.reason


def test_subfigures_are_the_diagonal(made, reward):
    cells, texts = split(grids()[0].media, 1, 2), ['a cat that says "hi."', "another cat sleeps."]
    image, text = (x.double().numpy() for x in by_open_clip(made["subfig_clipT"]["model"], cells, texts))
    first, _, none = reward("subfig_clipT").score(grids())
    assert first.value == pytest.approx((image @ text.T).diagonal().mean(), abs=2e-6)
    assert none.value is None and "no grid" in none.reason
    four = Sample(GRID, grids()[0].media, meta={"grid": "2x2"})
    (wrong,) = reward("subfig_clipT").score([four])
    assert wrong.value is None and "2 cells" in wrong.reason and "2x2" in wrong.reason


# Batches, order, clips


@pytest.mark.parametrize("name", ["clip", "pickscore"])
def test_each_different_text_and_image_is_encoded_once_in_batches(name, reward, monkeypatch):
    opened = reward(name)
    asked = []
    monkeypatch.setattr(opened.encoder, "batch_size", 2)
    for method in ("encode_texts", "encode_images"):
        encode = getattr(opened.encoder, method)
        monkeypatch.setattr(opened.encoder, method, lambda x, encode=encode: asked.append(x) or encode(x))
    samples = [Sample(prompt, picture(min(k, 4))) for k, prompt in enumerate(["a", "b", "a", "a", "b", "c"])]
    first, again = values(opened, samples), values(opened, samples)
    assert first == again and [x for x in asked if isinstance(x, list)] == 2 * [["a", "b"], ["c"]]
    assert [len(x) for x in asked if isinstance(x, torch.Tensor)] == 2 * [2, 2, 1]


@pytest.mark.parametrize("name", ["aesthetic", "clip", "clipscore", "hpsv2", "pickscore"])
def test_a_clip_is_the_mean_of_its_frames(name, reward):
    frames = [picture(k) for k in range(5)]
    clip = Sample("a red cat", Media(np.stack([f.pixels for f in frames])))
    each = values(reward(name), [Sample("a red cat", f) for f in frames])
    assert values(reward(name), [clip])[0] == pytest.approx(np.mean(each), rel=1e-5)
    assert values(reward(name, frames=1), [clip])[0] == pytest.approx(each[0], rel=1e-5)
    assert values(reward(name, frames=3), [clip])[0] == pytest.approx(np.mean([each[0], each[2], each[4]]), rel=1e-5)


def test_half_precision_still_gives_float32_vectors(reward):
    exact, rough = values(reward("clip"), pictures()), values(reward("clip", dtype="bfloat16"), pictures())
    np.testing.assert_allclose(rough, exact, atol=0.03)
    assert reward("clip", dtype="bfloat16").encoder.images([picture(0)]).dtype == torch.float32
    assert [x == float(np.float16(x)) for x in exact] == [False] * 3, "scores were rounded to half precision"


# Samples that cannot be scored


def test_scores_that_are_not_finite_are_missing(tmp_path, reward):
    folder = clip_folder(tmp_path / "clip")
    weights = load_file(folder / "model.safetensors")
    weights["visual_projection.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (score,) = reward("clipscore", model=str(folder)).score(pictures()[:1])
    assert score.value is None and "nan" in score.reason

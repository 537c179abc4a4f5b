"""Every registered reward runs, is documented, and gives the same scores over HTTP as in process.

Why these cases: a list of rewards that were never run is useless, and an undocumented one is not found.
A tiny checkpoint or server stands in for the published one; each reward's formula is tested in another file.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image, ImageDraw, ImageFont
from reward_cases import (
    MAKERS,
    OWN_PROMPTS,
    deqa,
    drawn,
    edits,
    geneval,
    grid,
    grids,
    hpsv3,
    imagereward,
    pictures,
    videoalign,
)
from servers import JudgeServer, judge, serving, speak
from world import grey, noise

from prefgrpo.config.loading import from_dict
from prefgrpo.data.media import Media
from prefgrpo.rewards import REWARDS, build, load_class
from prefgrpo.rewards.base import Sample

ROOT = Path(__file__).resolve().parents[2]
HEADER = "| name | input | scale | needs |"

# ---- a case for every reward -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """How to build a reward without downloads, and samples for it to score."""

    options: Callable[[Path], dict[str, Any]]
    """Creates a tiny checkpoint in the folder (or starts a server) and returns the reward's options."""
    samples: Callable[[], list[Sample]]
    """The samples to score."""
    needs: str = ""
    """Optional library; the case is skipped if it is not installed."""


def nothing(_: Path) -> dict[str, Any]:
    return {}


def judged(_: Path) -> dict[str, Any]:
    """Options with a judge that prefers the brighter image."""
    return {"judge": {"endpoints": [JudgeServer().__enter__().url]}}


def speaking(_: Path) -> dict[str, Any]:
    """Options with a judge that answers every shipped template."""
    server = JudgeServer()
    server.answer = speak
    return {"judge": judge(server.__enter__())}


def detailed() -> list[Sample]:
    """Images with different amounts of detail."""
    rng = np.random.default_rng(0)
    return [Sample("a picture", Media(rng.integers(0, 2**k, (48, 48, 3), np.uint8))) for k in (2, 5, 8)]


def sign(text: str) -> np.ndarray:
    image = Image.new("RGB", (288, 224), "white")
    ImageDraw.Draw(image).text((16, 16), text, fill="black", font=ImageFont.load_default(40))
    return np.asarray(image)


def signs() -> list[Sample]:
    """An image of the quoted text, one of other text, and a prompt that quotes nothing."""
    prompts = ['a sign "Tea Room"', 'a sign "Harbour"', "a sign"]
    return [Sample(p, Media(sign("TEA ROOM"))) for p in prompts]


def signs_in_clips() -> list[Sample]:
    """The same in clips, cropped to the line of text, which needs no detection."""
    return [Sample(s.prompt, Media(np.stack([s.media.pixels[12:64, 8:280]] * 3))) for s in signs()]


def group() -> list[Sample]:
    """Images of one prompt, from dark to bright."""
    return [Sample("a bright day", grey(level)) for level in (40, 120, 200)]


def grids_of_cats() -> list[Sample]:
    """Four samples of different brightness, each a grid of four cells."""
    levels = [(40, 60, 90, 130), (200, 180, 90, 80), (10, 20, 30, 40), (250, 240, 10, 100)]
    return [Sample("a 2x2 grid of cats", grid(*four), (grey(128),)) for four in levels]


def points() -> list[Sample]:
    """Samples with two test points; they satisfy none, one and both."""
    dims = {"Testpoints": ["Style", "Attribute - Color"], "Testpoint Description": ["ink", "red"]}
    return [Sample("red ink", grey(level), (), {"sub_dims_en": json.dumps(dims)}) for level in (10, 90, 240)]


def questions() -> list[Sample]:
    """Samples with a question about a number and one about a thing."""
    asked = [["How many cats?", "two"], ["Are there cats?", "Yes"]]
    return [Sample("two cats", grey(level), (), {"vqa_list": asked}) for level in (10, 90, 240)]


def of_many_sizes() -> list[Sample]:
    """Images of several sizes with their prompts."""
    return [Sample(p, noise(k, 40 + 9 * k, 56)) for k, p in enumerate(OWN_PROMPTS)]


def clips() -> list[Sample]:
    return [Sample(p, noise(k, frames=8 + k)) for k, p in enumerate(OWN_PROMPTS[:2])]


def photos() -> list[Sample]:
    """Images with GenEval's metadata columns; the detector sees no person and several couches."""
    asked = [{"tag": "single_object", "include": [{"class": c, "count": 1}]} for c in ("person", "couch")]
    return [Sample("a photo", noise(k), meta=meta) for k, meta in enumerate(asked)]


SAMPLES = {"image_similarity": edits, "subfig_clipT": grids}
JUDGED = (
    "unifiedreward_alignment",
    "unifiedreward_style",
    "unifiedreward_coherence",
    "unifiedreward_sglang",
    "qwenvl",
    "unifiedreward_edit_pointwise_instruction_following",
    "consistency_score",
    "consistency_for_editing",
    "unifiedreward_think",
    "unifiedreward_flex",
    "unifiedreward_edit_pairwise",
)
CASES = {
    "jpeg_compressibility": Case(nothing, detailed),
    "jpeg_incompressibility": Case(nothing, detailed),
    "scenes": Case(nothing, drawn),
    "ocr": Case(nothing, signs, needs="rapidocr"),
    "video_ocr": Case(lambda _: {"detect": False}, signs_in_clips, needs="rapidocr"),
    "vlm_pairwise": Case(judged, group),
    "unigenbench": Case(speaking, points),
    "soft_tifa": Case(speaking, questions),
    "unifiedreward_edit_pointwise_image_quality": Case(
        lambda folder: speaking(folder) | {"weights": {"artifacts": 0.5}},
        grids_of_cats,  # its two scores move in opposite directions
    ),
    "imagereward": Case(lambda folder: imagereward(folder / "ir"), of_many_sizes),
    "hpsv3": Case(hpsv3, of_many_sizes),
    "videoalign": Case(videoalign, clips),
    "deqa": Case(lambda folder: deqa(folder / "deqa"), of_many_sizes),
    "geneval": Case(geneval, photos),
}
CASES |= dict.fromkeys(JUDGED, Case(speaking, grids_of_cats))
for _name, _maker in MAKERS.items():
    CASES[_name] = Case(lambda folder, maker=_maker: maker(folder / "made"), SAMPLES.get(_name, pictures))
POINTWISE = [name for name in REWARDS if not load_class(name).compares]


def dear_ones_are_full(names):
    """OCR runs its real models, and takes as long as all others."""
    return [pytest.param(name, marks=[pytest.mark.full] * (name == "ocr")) for name in names]


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> (options, reward, its scores for the case's samples); each reward is built and run once."""

    @cache
    def make(name):
        if CASES[name].needs:
            pytest.importorskip(CASES[name].needs)
        options = CASES[name].options(tmp_path_factory.mktemp(name))
        reward = build(name, {name: options})[name]
        return options, reward, reward.score(CASES[name].samples())

    return make


def documented():
    """name -> the cells of its row in docs/rewards.md."""
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = page.split(HEADER)[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table]
    assert len({r[0] for r in rows}) == len(rows), "a reward has two rows"
    return {row[0].strip("`"): row[1:] for row in rows}


def test_every_reward_has_a_case_and_a_row():
    assert sorted(CASES) == sorted(documented()) == sorted(REWARDS)


@pytest.mark.parametrize("name", dear_ones_are_full(REWARDS))
def test_runs(name, made):
    """Finite values that differ between samples, in the samples' order; missing ones have a reason."""
    (_, reward, found), samples = made(name), CASES[name].samples()
    turned = reward.score(samples[::-1])[::-1]
    assert len(found) == len(samples)
    values = [np.nan if s.value is None else s.value for s in found]
    assert all(s.reason for s in found if s.value is None)
    assert np.isfinite(values).sum() >= 2 and not np.isinf(values).any(), found
    assert np.nanmax(values) > np.nanmin(values), "all samples have the same score"
    same = [np.nan if s.value is None else s.value for s in turned]
    np.testing.assert_allclose(same, values, rtol=1e-4, atol=1e-5)
    for sample in samples:
        assert ("video" if sample.media.clip else "image") in reward.takes
        assert sample.source or not reward.needs_source
        assert set(reward.meta_keys) <= set(sample.meta)


def odd(name):
    """(sample, whether it must be missing with a reason), with unusual shapes, dtypes and prompts."""
    base, takes = CASES[name].samples()[0], load_class(name).takes
    rng = np.random.default_rng(0)
    image, clip = rng.integers(0, 256, (64, 96, 3), np.uint8), rng.integers(0, 256, (8, 32, 48, 3), np.uint8)
    pixels, other = (image, clip) if "image" in takes else (clip, image)
    wrong = [pixels / 255.0, pixels[..., 0], pixels[:0], np.dstack([pixels[..., :2]] * 2)]
    wrong += [] if set(takes) == {"image", "video"} else [other]
    fine = [
        pixels[..., :1, :1, :],
        pixels[..., ::2, ::-1, :],
        pixels[..., :2, :, :],
        clip[:1] if pixels is clip else image,
    ]
    prompts = ["", " 家🐈\u202e\0", "\ud800", ' {media_1} %s <|image_pad|> "' + " word" * 200_000]
    media = [(m, True) for m in wrong] + [(m, None) for m in fine]
    texts = [(replace(base, prompt=base.prompt * bool(text) + text), None) for text in prompts]
    return [(replace(base, media=Media(m)), bad) for m, bad in media] + texts


@pytest.mark.parametrize("name", dear_ones_are_full(POINTWISE))
def test_odd_samples_have_a_finite_score_or_a_reason_and_leave_their_neighbours_alone(name, made):
    _, reward, (expected, *_) = made(name)
    base, cases = CASES[name].samples()[0], odd(name)
    assert reward.score([]) == []
    *found, last = reward.score([*(sample for sample, _ in cases), base])
    assert last.reason == expected.reason
    assert (last.value or 0.0) == pytest.approx(expected.value or 0.0, rel=1e-4, abs=1e-5)
    for score, (sample, bad) in zip(found, cases, strict=True):
        told = (sample.media.pixels.shape, sample.media.pixels.dtype, sample.prompt[:40], score)
        assert score.reason if score.value is None else np.isfinite(score.value) and not bad, told


@pytest.mark.parametrize("name", dear_ones_are_full(REWARDS))
def test_is_the_same_behind_http(name, made):
    """`reward serve` gets ready with its own probe sample, and its scores equal those of the reward in process."""
    (options, _, here), samples = made(name), CASES[name].samples()
    with serving(name, options) as url:
        remote = build(name, {name: {"url": url, "timeout_s": 60.0}})[name]
        there = remote.score(samples)
        remote.close()
    assert [s.value is None for s in there] == [s.value is None for s in here], there
    for a, b in zip(there, here, strict=True):
        assert a.reason == b.reason
        assert a.value == pytest.approx(b.value, rel=1e-4, abs=1e-5) if b.value is not None else a.value is None
        assert a.parts == pytest.approx(b.parts, rel=1e-4, abs=1e-5, nan_ok=True)


def block(language):
    """The first code block in `language` in docs/rewards.md."""
    return re.search(rf"```{language}\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8"), re.S)[1]


def test_the_pages_recipe_is_one():
    rest = {"model": "black-forest-labs/FLUX.1-dev", "data": {"prompts": "prompts.txt"}}
    config = from_dict(rest | yaml.safe_load(block("yaml")))
    assert {entry.name: entry.weight for entry in config.rewards}["aesthetic"] == 0
    assert all(entry.options for entry in config.rewards)


@pytest.mark.full
def test_every_module_imports_without_its_libraries():
    """So that specs can be checked and rewards used over HTTP without installing the rewards' libraries."""
    script = """
import importlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"transformers", "open_clip", "torchvision", "safetensors", "tokenizers", "cv2",
                                  "rapidocr", "rapidfuzz", "paddleocr", "peft", "diffusers"}:
            raise ImportError(f"blocked: {name}")
sys.meta_path.insert(0, Blocked())
from prefgrpo.config.loading import from_dict
from prefgrpo.rewards import REWARDS, load_class, show_rewards
[load_class(name) for name in REWARDS]
show_rewards()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

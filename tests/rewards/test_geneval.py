"""GenEval's scores and detectors.

Why these cases: each tag has its own rule, and Flow-GRPO's soft score has edge cases that are easily lost in a rewrite
(negative for surplus objects, two terms for a wrong place, colours ignored after a wrong count). Expected values are
worked out by hand from the published rules. Oracles for the detectors: transformers' own post-processing and a
hand-drawn mask.
"""

import numpy as np
import pytest
import torch
from reward_cases import mask2former
from world import noise

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.detectors import Detection, MMDet, Transformers, bounds
from prefgrpo.rewards.geneval import (
    COLOURS,
    GROUND,
    GenEval,
    check_columns,
    crop,
    filter_detections,
    relations,
    score_objects,
)

NAMES = frozenset({"dog", "cat", "cup", "bench"})


def box(name, x=0, y=0, wide=10, high=10, score=0.95, mask=None):
    return Detection(name, score, np.array([x, y, x + wide, y + high], dtype=float), mask)


def clause(name, count=1, **more):
    return {"class": name, "count": count, **more}


DOG, CAT, CUP = box("dog"), box("cat", 40), box("cup", 40, 40)
TWO, RED = [clause("dog"), clause("cat")], [clause("dog", color="red")]
PLACED = [clause("dog"), clause("cat", position=["right of", 0])]
ATTRIBUTES = [clause("dog", color="red"), clause("cat", color="black")]
PLACED_RED = [clause("dog"), clause("cat", color="red", position=["right of", 0])]
THREE = {"tag": "counting", "exclude": [clause("dog", 4)]}


@pytest.mark.parametrize(
    ("found", "include", "expected", "more"),
    [
        ([DOG], [clause("dog")], (1.0, True), {}),
        ([], [clause("dog")], (0.0, False), {}),
        ([DOG, DOG], [clause("dog")], (0.0, True), {}),  # one too many: GenEval's "correct" holds
        ([DOG] * 4, [clause("dog")], (-2.0, True), {}),  # 1 − 3/1, not clamped
        ([DOG, CUP], [clause("dog")], (1.0, True), {}),  # objects that are not asked about are ignored
        ([DOG, CAT], TWO, (1.0, True), {}),
        ([DOG], TWO, (0.5, False), {}),
        ([DOG, DOG, CAT], TWO, (0.5, True), {}),
        ([DOG, CAT], [clause("dog")], (1.0, False), {"exclude": [clause("cat")]}),
        # counting; more than 16 objects of a class count as 16
        ([], [clause("dog", 3)], (0.0, False), THREE),
        ([DOG] * 2, [clause("dog", 3)], (2 / 3, False), THREE),
        ([DOG] * 3, [clause("dog", 3)], (1.0, True), THREE),
        ([DOG] * 4, [clause("dog", 3)], (2 / 3, False), THREE),
        ([DOG] * 40, [clause("dog", 3)], (1 - 13 / 3, False), THREE),
        # colors
        ([DOG], RED, (1.0, True), {"dog": ["red"]}),
        ([DOG], RED, (0.5, False), {"dog": ["blue"]}),
        ([DOG] * 2, [clause("dog", 2, color="red")], (0.75, False), {"dog": ["red", "blue"]}),
        ([DOG] * 2, RED, (0.0, True), {"dog": ["red", "blue"]}),  # (0 + 0)/2
        ([DOG] * 2, RED, (0.0, False), {"dog": ["blue", "red"]}),  # the most confident one is blue
        ([], RED, (0.0, False), {}),
        ([DOG, CAT], ATTRIBUTES, (0.75, False), {"dog": ["red"], "cat": ["white"]}),  # (1 + 1 + 1 + 0)/4
        # position
        ([DOG, CAT], PLACED, (1.0, True), {}),
        ([DOG, box("cat", -40)], PLACED, (0.75, False), {}),  # (1 + 1 + 0 + 1)/4: a wrong place is two terms
        ([DOG, box("cat", 1.5)], PLACED, (0.75, False), {}),  # within the margin of .1·(10 + 10)
        ([CAT], PLACED, (1 / 3, False), {}),  # no dog: (0 + 1 + 0)/3
        ([DOG], PLACED, (1 / 3, False), {}),  # no cat: (1 + 0 + 0)/3
        ([DOG, CAT, CAT], PLACED, (1 / 3, True), {}),  # a surplus of cats: (1 + 0 + 0)/3
        ([DOG, CAT], PLACED_RED, (2 / 3, False), {"cat": ["blue"]}),  # a wrong colour: place not checked
    ],
)
def test_verdicts(found, include, expected, more):
    objects = filter_detections(found, counting=more.get("tag") == "counting")
    got = score_objects(objects, {"include": include, "exclude": more.get("exclude")}, lambda name: list(more[name]))
    assert got == pytest.approx(expected)


def test_thresholds_are_exclusive_and_higher_for_counting():
    found = [box("dog", score=s) for s in (0.3, 0.31, 0.9, 0.91)]
    for counting, scores in ((False, [0.91, 0.9, 0.31]), (True, [0.91])):
        assert [f.score for f in filter_detections(found, counting)["dog"]] == scores


def test_columns_of_a_table_have_none_where_json_has_nothing():
    rows = [clause("dog", color=None, position=None), clause("cat", color=None, position=["right of", 0])]
    check_columns({"tag": "position", "include": rows, "exclude": None}, NAMES)
    assert score_objects(filter_detections([DOG, CAT], False), {"include": rows, "exclude": None}, lambda _: []) == (
        1.0,
        True,
    )


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [(40, 0, {"right of"}), (-40, 0, {"left of"}), (0, 40, {"below"}), (0, -40, {"above"}), (0, 0, set()),
     (2, 0, set()), (2.5, 0, set()), (40, 40, {"right of", "below"}), (40, 15, {"right of"})],
)  # fmt: skip
def test_relations(x, y, expected):
    """(2.5, 0) is only .5 beyond the margin of 2, a fifth of the distance, so no relation holds."""
    assert relations(box("a", x, y), box("b")) == expected


def test_a_crop_shows_the_object_before_grey():
    mask = np.zeros((40, 56), bool)
    mask[10:20, 8:30] = True
    mask[10, 8] = False
    media = noise(0)
    got = crop(media.pil, Detection("dog", 1.0, bounds(mask), mask)).pixels
    expected = media.pixels[10:20, 8:30].copy()
    expected[0, 0] = GROUND
    assert np.array_equal(got, expected)
    assert np.array_equal(crop(media.pil, box("dog", 3, 4, 5, 6)).pixels, media.pixels[4:10, 3:8])
    assert crop(media.pil, box("dog", 3, 4, 0, 0)).pixels.shape == (1, 1, 3)


class Painter:
    """A stub detector that returns the given detections for every image."""

    names = NAMES

    def __init__(self, device: str, found: list | None = None) -> None:
        self.found = found or []

    def __call__(self, images):
        return [self.found for _ in images]


PAINT = {"red": (230, 20, 20), "green": (20, 160, 40), "blue": (20, 40, 220), "black": (0, 0, 0), "white": (255,) * 3}


class Eye:
    """A stub CLIP: its image vector marks the paint nearest to a crop's centre, its text vectors the colour named."""

    def texts(self, texts):
        return torch.stack([torch.tensor([float(f" {c}" in t) for c in COLOURS]) for t in texts])

    def images(self, media):
        middle = [m.pixels[m.pixels.shape[0] // 2, m.pixels.shape[1] // 2].astype(float) for m in media]
        near = [min(PAINT, key=lambda c, p=p: float(((np.array(PAINT[c]) - p) ** 2).sum())) for p in middle]
        return torch.stack([torch.tensor([float(c == n) for c in COLOURS]) for n in near])


def reward(found, monkeypatch, **options):
    monkeypatch.setattr("prefgrpo.rewards.encoder.get_encoder", lambda *_, **__: Eye())
    return GenEval(detector=f"{__name__}:Painter", detector_options={"found": found}, device="cpu", **options)


def test_scores_carry_soft_correct_and_the_tags_own(monkeypatch):
    pixels = np.full((40, 56, 3), 255, np.uint8)
    pixels[0:10, 0:10], pixels[0:10, 40:50] = PAINT["red"], PAINT["blue"]
    found = [box("dog"), box("cat", 40)]
    include = [clause("dog", color="red"), clause("cat", color="green")]
    sample = Sample("", Media(pixels), meta={"tag": "color_attr", "include": include})
    score = reward(found, monkeypatch).score([sample])[0]
    assert score.value == 0.75
    assert score.parts == {"soft": 0.75, "correct": 0, "correct/color_attr": 0}
    include[1]["color"] = "blue"
    for value in ("soft", "correct"):
        assert reward(found, monkeypatch, value=value).score([sample])[0].value == 1.0


BAD = [
    ({"tag": "drawbench", "include": [clause("dog")]}, "expected a tag of single_object"),
    ({"tag": "colors", "include": [clause("unicorn")]}, "no class 'unicorn'"),
    ({"tag": "colors", "include": [clause("dog", color="mauve")]}, "a color of red"),
    ({"tag": "position", "include": [clause("dog"), clause("cat", position=["near", 0])]}, "an earlier clause"),
]


@pytest.mark.parametrize(("meta", "why"), BAD)
def test_what_cannot_be_judged_is_missing_with_a_reason(meta, why, monkeypatch):
    """Flow-GRPO's server returns −10 for an unknown tag; here the sample is missing, the rest of the batch scored."""
    fine = Sample("", noise(1), meta={"tag": "two_object", "include": [clause("dog"), clause("cat")]})
    bad, good = reward([DOG], monkeypatch).score([Sample("", noise(0), meta=meta), fine])
    assert bad.value is None and why in bad.reason
    assert good.value == 0.5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("geneval")
    return {"m": mask2former(place / "m")}


def test_mask2former_scores_and_boxes_against_their_definition(folders):
    """Class probability × mean mask probability for every (query, class); boxes of the masks at the image's size."""
    detector = Transformers(folders["m"], "cpu")
    media = [noise(0, 48, 64), noise(1, 30, 90)]
    assert detector.names == {"person", "couch", "computer mouse"}
    for medium, found in zip(media, detector(media), strict=True):
        pixels = detector._processor(images=[medium.pil], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            out = detector._model(pixel_values=pixels)
        logits = torch.nn.functional.interpolate(out.masks_queries_logits, pixels.shape[2:], mode="bilinear")
        logits = torch.nn.functional.interpolate(logits, medium.pixels.shape[:2], mode="bilinear")[0]
        chances = out.class_queries_logits.softmax(-1)[0, :, :-1]
        expected = []
        for query, mask in enumerate(logits > 0):
            if mask.any():
                sure = logits[query].sigmoid()[mask].mean()
                ys, xs = torch.where(mask)
                area = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
                expected += [(float(c * sure), [float(a) for a in area], int(mask.sum())) for c in chances[query]]
        got = [(f.score, f.box.tolist(), int(f.mask.sum())) for f in found]
        assert len(found) == len(expected) > 0
        for (a, box_a, size_a), (b, box_b, size_b) in zip(sorted(got), sorted(expected), strict=True):
            assert a == pytest.approx(b, abs=1e-6) and (box_a, size_a) == (box_b, size_b)


class Result:
    """The result object of MMDetection 3."""

    def __init__(self, **fields):
        self.__dict__ |= fields

    def __contains__(self, key):
        return key in self.__dict__


def test_mmdet(monkeypatch):
    """Uses a stub of its API: MMDetection itself needs a compiled mmcv (scripts/setup_reward.sh)."""
    shown, mask = [], np.zeros((40, 56), bool)
    mask[3:9, 4:8] = True
    kept = {"labels": [1], "scores": [0.75], "bboxes": [[4.0, 3, 8, 9]], "masks": mask[None]}
    result = Result(pred_instances=Result(**{k: torch.tensor(v) for k, v in kept.items()}))
    apis = Result(
        init_detector=lambda *_, **__: Result(dataset_meta={"classes": ("person", "mouse")}),
        inference_detector=lambda _, images: shown.extend(images) or [result for _ in images],
    )
    monkeypatch.setattr("prefgrpo.rewards.detectors.library", lambda *_: apis)
    (found,) = MMDet("c.py", "m.pth", "cpu")([noise(0)])[0]
    assert (found.name, found.score, found.box.tolist()) == ("computer mouse", 0.75, [4, 3, 8, 9])
    assert np.array_equal(found.mask, mask) and np.array_equal(shown[0], noise(0).pixels[..., ::-1])  # BGR

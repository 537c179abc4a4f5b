"""`geneval`: checks with a detector that the objects in a prompt are present, in the right number, colour and place.

    soft = mean over the clauses of  1 − |wanted − found| / wanted,  a colour term and a place term
    correct = GenEval's own verdict: at least the wanted objects, in their colours and places, and none excluded

The soft score is that of Flow-GRPO's server: too many objects can make it negative, and a wrong place adds two terms, 0
and 1. Colours are the nearest of ten under CLIP, with the object on a grey background.
Sources: Ghosh et al., "GenEval" (arXiv 2310.11513); Liu et al., "Flow-GRPO" (arXiv 2505.05470).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import PositiveInt
from torch.nn import functional

from prefgrpo.config.by_path import load_object
from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.rewards import encoder
from prefgrpo.rewards.base import Question, Reward, RewardError, Sample
from prefgrpo.rewards.detectors import Detection, Detector

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
PHRASES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
GROUND = (0x99, 0x99, 0x99)
RELATIONS = ("left of", "right of", "above", "below")
THRESHOLD = 0.3
COUNTING_THRESHOLD = 0.9
MOST = 16
"""Maximum detections per class."""
MARGIN = 0.1
"""Margin between objects as a fraction of their widths and heights."""
Objects = Mapping[str, Sequence[Detection]]
Colours = Callable[[str], list[str]]


@dataclass(kw_only=True, eq=False)
class GenEval(Reward):
    """GenEval's objects, counts, colours and places.

    The soft score of Flow-GRPO's server is at most 1, and negative for surplus objects; `correct` is GenEval's own
    verdict (arXiv 2310.11513). Values are logged per tag.

    detector: pkg.mod:Class of a Detector (detectors.py). detector_options: its arguments, {model: …} or {config: …,
    checkpoint: …}. clip: folder or hub id of the CLIPModel that classifies colours. value: soft or correct. device:
    auto, cpu, cuda, cuda:1. batch_size: images per forward.
    """

    meta_keys = ("tag", "include")
    reads = ("exclude",)
    probe: ClassVar[dict[str, Any]] = {
        "prompt": "a photo of a person", "tag": "single_object", "include": [{"class": "person", "count": 1}],
    }  # fmt: skip

    detector: str = "prefgrpo.rewards.detectors:Transformers"
    detector_options: dict[str, Any] | None = None
    clip: str = "openai/clip-vit-large-patch14"
    value: Literal["soft", "correct"] = "soft"
    device: str = "auto"
    batch_size: PositiveInt = 8

    def __post_init__(self) -> None:
        try:
            detector = load_object(self.detector)
        except (ImportError, AttributeError, ValueError) as error:
            expected = f"geneval: cannot load the detector '{self.detector}' (expected pkg.mod:Class)"
            raise RewardError(f"{expected}: {error}") from error
        self.detect: Detector = detector(**{"device": self.device, **(self.detector_options or {})})
        self.encoder = encoder.get_encoder(
            encoder.Transformers, model=self.clip, device=self.device, dtype="float32", batch_size=32
        )

    def check(self, sample: Sample) -> None:
        """Also rejects samples whose columns ask for what cannot be found."""
        super().check(sample)
        check_columns(sample.meta, self.detect.names)

    def ask(self, asked: list[Question]) -> list[Answer]:
        """The value of each image; parts: soft, correct, and the last again under the sample's tag."""
        samples = [sample for (sample,) in asked]
        detections = self.detect([s.media for s in samples])
        return [self._score(s, things) for s, things in zip(samples, detections, strict=True)]

    def _score(self, sample: Sample, detections: Sequence[Detection]) -> Answer:
        objects = filter_detections(detections, counting=sample.meta["tag"] == "counting")
        colours = cache(lambda name: self.colours(sample.media, name, objects[name]))
        soft, correct = score_objects(objects, sample.meta, colours)
        parts = {"soft": soft, "correct": float(correct)}
        return Answer(parts[self.value], parts=parts | {f"correct/{sample.meta['tag']}": float(correct)})

    def colours(self, media: Media, name: str, objects: Sequence[Detection]) -> list[str]:
        """The colour of each of these objects of class `name`."""
        texts = [p.format(colour=colour, name=name) for colour in COLOURS for p in PHRASES]
        each = self.encoder.texts(texts).view(len(COLOURS), len(PHRASES), -1)
        classes = functional.normalize(each.mean(1), dim=-1)
        crops = [crop(media.pil, f) for f in objects]
        return [COLOURS[int(k)] for k in torch.argmax(self.encoder.images(crops) @ classes.T, dim=1)]


def check_columns(meta: Mapping[str, Any], names: frozenset[str]) -> None:
    """Raise ValueError for columns that ask for what can never be found, so that the sample would score 0."""
    if meta["tag"] not in TAGS:
        raise ValueError(f"geneval: expected a tag of {', '.join(TAGS)}, got {meta['tag']!r}")
    for k, clause in enumerate([*meta["include"], *(meta.get("exclude") or [])]):
        if clause["class"] not in names:
            raise ValueError(f"geneval: the detector knows no class {clause['class']!r}")
        if clause.get("color") and clause["color"] not in COLOURS:
            raise ValueError(f"geneval: expected a color of {', '.join(COLOURS)}, got {clause['color']!r}")
        relation, target = clause.get("position") or (RELATIONS[0], -1)
        if relation not in RELATIONS or target >= k:
            expected = f"one of {', '.join(RELATIONS)} and an earlier clause"
            raise ValueError(f"geneval: expected {expected}, got {clause['position']!r}")


def filter_detections(detections: Sequence[Detection], counting: bool) -> dict[str, list[Detection]]:
    """Objects above the threshold by class, in order of score, at most 16 per class."""
    least = COUNTING_THRESHOLD if counting else THRESHOLD
    objects: defaultdict[str, list[Detection]] = defaultdict(list)
    for thing in sorted(detections, key=lambda f: -f.score):
        if thing.score > least and len(objects[thing.name]) < MOST:
            objects[thing.name].append(thing)
    return dict(objects)


def crop(image: Image.Image, detection: Detection) -> Media:
    """Crop to the object's box, with pixels outside its mask set to grey."""
    if detection.mask is not None:
        image = Image.composite(image, Image.new("RGB", image.size, GROUND), Image.fromarray(detection.mask))
    left, top, right, bottom = (round(float(x)) for x in detection.box)
    return Media(np.array(image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))))


def relations(a: Detection, b: Detection) -> set[str]:
    """Position of a relative to b: directions in which the offset beyond the margin is over half the distance."""
    low, high = np.array([a.box[:2], b.box[:2]]), np.array([a.box[2:], b.box[2:]])
    centres, sizes = (low + high) / 2, np.abs(high - low)
    offset = centres[0] - centres[1]
    beyond = np.maximum(np.abs(offset) - MARGIN * sizes.sum(0), 0) * np.sign(offset)
    if np.all(np.abs(beyond) < 1e-3):
        return set()
    x, y = beyond / np.linalg.norm(offset)
    return {name for name, share in zip(RELATIONS, (-x, x, -y, y), strict=True) if share > 0.5}


def score_objects(objects: Objects, meta: Mapping[str, Any], colours: Colours) -> tuple[float, bool]:
    """(soft, correct) for detected objects. `colours(name)`: colours of the objects of a class, in order."""
    terms: list[float] = []
    exact: list[Sequence[Detection] | None] = []
    least: list[Sequence[Detection] | None] = []
    for clause in meta["include"]:
        things = objects.get(clause["class"], ())
        wanted = clause["count"]
        colour = clause.get("color")
        position = clause.get("position")
        terms.append(1 - abs(wanted - len(things)) / wanted)  # soft: counts, colours and places are exact
        right = len(things) == wanted
        if not right and (colour or position):
            terms.append(0.0)
        elif right and colour:
            same = colours(clause["class"]).count(colour)
            terms.append(1 - abs(wanted - same) / wanted)
            right = same == wanted
        if right and position:
            relation, target = position
            right = _has_relation(things, exact[target], relation)
            terms += [1.0] if right else [0.0] if exact[target] is None else [0.0, 1.0]
        exact.append(things if right else None)
        surest = things[:wanted]  # correct: only the `wanted` best objects must match in colour and place
        right = len(surest) == wanted
        right = right and (not colour or colours(clause["class"])[:wanted].count(colour) == wanted)
        right = right and (not position or _has_relation(surest, least[position[1]], position[0]))
        least.append(surest if right else None)
    excluded = any(len(objects.get(c["class"], ())) >= c["count"] for c in meta.get("exclude") or ())
    return sum(terms) / len(terms), None not in least and not excluded


def _has_relation(detections: Sequence[Detection], target: Sequence[Detection] | None, relation: str) -> bool:
    """Whether every object has the relation to every target object."""
    return target is not None and all(relation in relations(a, b) for a in detections for b in target)

"""`unigenbench`: a served vision-language model marks which test points of its prompt an image meets.

    value = mean of the marks (0 or 1), one per test point; part 'k NAME' is the mark of the k-th point

The test points are in a column of UniGenBench's tables (arXiv 2510.18701), `sub_dims_en` or `sub_dims_zh`: JSON with
each point's name and the part of the prompt it refers to. The shipped question is ours; the suite's evaluation models
were trained on that of its eval/src/eval_common.py, which `template` may name (the file is parsed, never run).
Invariant: a reply that does not mark every point once is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Json, TypeAdapter

from prefgrpo.data.answer import Answer
from prefgrpo.judge.published import published_texts
from prefgrpo.rewards.base import RewardError, Sample, read_column
from prefgrpo.rewards.vlm import VlmReward

KEYS = {"en": ("Testpoints", "Testpoint Description"), "zh": ("考点", "考点对应描述")}
"""Language → JSON keys of the test points' names and descriptions."""
_ROW: TypeAdapter[dict[str, Any]] = TypeAdapter(Json[dict[str, Any]])
_TEXTS = ("explanation_dict", "system_prompt_template", "checkpoint_header", "checkpoint_desc_header")
_PROBE = {"Testpoints": ["Style"], "Testpoint Description": ["a photo"]}


@dataclass(frozen=True)
class Points:
    """The test points of one prompt."""

    language: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    """The part of the prompt that each point refers to."""


def points_of(meta: Mapping[str, Any]) -> Points:
    """The test points from a row's columns. Raises ValueError if they are missing or invalid."""
    language = next((name for name in KEYS if meta.get(f"sub_dims_{name}")), None)
    if language is None:
        raise ValueError("expected a column sub_dims_en or sub_dims_zh with the test points")
    row = read_column(meta, f"sub_dims_{language}", _ROW, "JSON of the test points")
    names, descriptions = (tuple(map(str, row.get(key) or ())) for key in KEYS[language])
    if not names or len(names) != len(descriptions):
        raise ValueError(f"expected as many descriptions as test points, got {names} and {descriptions}")
    return Points(language, names, descriptions)


class Wording:
    """The question of the suite's own eval_common.py, by language."""

    def __init__(self, file: Path) -> None:
        """Extract the texts from the file's source. RewardError if they are not there."""
        try:
            languages = published_texts(file.read_text(encoding="utf-8"))["LANG_CONFIGS"][0]
            self.texts = {name: {key: languages[name][key] for key in _TEXTS} for name in KEYS}
        except (OSError, SyntaxError, KeyError, TypeError) as error:
            raise RewardError(
                f"unigenbench: {file} is not the suite's eval/src/eval_common.py ({type(error).__name__}: {error})"
            ) from error

    def question(self, prompt: str, points: Points) -> str:
        """The suite's question about a prompt's image. Raises ValueError for a test point that the file lacks."""
        texts = self.texts[points.language]
        known = texts["explanation_dict"]
        if unknown := [name for name in points.names if name not in known]:
            raise ValueError(f"eval_common.py has no explanation of the test point {unknown[0]!r}")
        explained = "".join(f"\n{name}: {known[name]}" for name in points.names)
        described = "".join(f"\n{name}: {text}" for name, text in zip(points.names, points.descriptions, strict=True))
        question: str = texts["system_prompt_template"].format(
            prompt=prompt,
            testpoint=list(points.names),
            explanation=f"{texts['checkpoint_header']}:\u300c{explained}\n\u300d",
            test_explanation=f"{texts['checkpoint_desc_header']}:\u300c{described}\n\u300d",
        )
        return question


class UniGenBench(VlmReward):
    """Fraction of a prompt's test points that the image meets, 0 … 1.

    Source: UniGenBench (arXiv 2510.18701).

    template: the question, a YAML file or UniGenBench's eval_common.py; empty: our wording, in the prompt's language.
    """

    template = "unigenbench"
    reads = ("sub_dims_en", "sub_dims_zh")
    needs = ("prompt", "media_1", "checkpoints")
    kinds = ("marks",)
    probe: ClassVar[dict[str, Any]] = {"prompt": "a photo", "sub_dims_en": json.dumps(_PROBE)}

    def __post_init__(self) -> None:
        file = self.template if self.template.endswith(".py") else ""
        self.wording = Wording(Path(file)) if file else None
        self.template = "" if file else self.template
        super().__post_init__()
        own = self.question.name == "unigenbench"
        self.questions = {"en": self.question, "zh": self.load("unigenbench_zh") if own else self.question}
        if file:
            plain = replace(self.question, name=file, user="{media_1}{asked}")
            self.questions = dict.fromkeys(KEYS, plain)

    async def ask_one(self, *samples: Sample) -> Answer:
        """The mean of the marks."""
        (sample,) = samples
        points = points_of(sample.meta)
        if self.wording:
            texts = {"asked": self.wording.question(sample.prompt, points)}
        else:
            named = enumerate(zip(points.names, points.descriptions, strict=True), start=1)
            texts = {"checkpoints": "\n".join(f"{k}. {name}: {text}" for k, (name, text) in named)}
        return score_from_marks(points, await self.answer_to(self.questions[points.language], sample, None, **texts))


def score_from_marks(points: Points, answer: Answer) -> Answer:
    """The score from a reply; missing, with the reply kept, unless it marks every point once."""
    if answer.reason:
        return Answer(None, answer.reason, raw=answer.raw)
    if len(answer.parts) != len(points.names):
        wrong = f"expected {len(points.names)} marks, one per test point, got {len(answer.parts)}"
        return Answer(None, wrong, raw=answer.raw)
    parts = {f"{k} {name}": answer.parts[str(k)] for k, name in enumerate(points.names, start=1)}
    return Answer(sum(parts.values()) / len(parts), parts=parts, raw=answer.raw)

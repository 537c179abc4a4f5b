"""`soft_tifa`: a served vision-language model answers one question per requirement of the prompt (arXiv 2512.16853).

    value = (Π p_k)^(1/n)      p_k: probability that the answer to the k-th question begins with the right word

The column `vqa_list` holds [question, answer] pairs, as in GenEval 2's file: numbers up to ten as words, otherwise
"Yes". Part 'k' is p_k. A right answer outside the server's 20 likeliest tokens counts with the largest probability
that it can have. Invariant: without an answer to every question the image is missing.
"""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter

from prefgrpo.data.answer import Answer
from prefgrpo.judge.template import Template
from prefgrpo.rewards.base import RewardError, Sample, read_column
from prefgrpo.rewards.vlm import VlmReward

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_QUESTIONS: TypeAdapter[list[tuple[str, str]]] = TypeAdapter(Annotated[list[tuple[str, str]], Field(min_length=1)])


def suite_ending(file: Path) -> str:
    """What the suite's evaluation.py puts behind a question. RewardError if it is not that file."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "soft_tifa"]
        texts = [n.value for f in functions for n in ast.walk(f) if isinstance(n, ast.Constant)]
        (form,) = [text for text in texts if isinstance(text, str) and text.startswith("{}")]
    except (OSError, SyntaxError, ValueError) as error:
        raise RewardError(f"soft_tifa: {file} is not GenEval 2's evaluation.py ({error})") from error
    return form.removeprefix("{}")


class SoftTifa(VlmReward):
    """Geometric mean of the probabilities of the right answers to the prompt's questions, 0 … 1.

    Source: Soft-TIFA (arXiv 2512.16853).

    template: the question, a YAML file or GenEval 2's evaluation.py; empty: our wording.
    """

    template = "soft_tifa"
    meta_keys = ("vqa_list",)
    needs = ("media_1", "asked")
    kinds = ("word",)
    probe: ClassVar[dict[str, Any]] = {"prompt": "a photo", "vqa_list": [["Is this a photo?", "Yes"]]}

    def __post_init__(self) -> None:
        file = self.template if self.template.endswith(".py") else ""
        self.template = "" if file else self.template
        super().__post_init__()
        if file:
            self.question = replace(self.question, name=file, user="{media_1}{asked}" + suite_ending(Path(file)))
        self.expecting = cache(self._expecting)

    def _expecting(self, answer: str) -> Template:
        """The question whose right answer is this word."""
        digits = str(NUMBERS.index(answer) + 1) if answer in NUMBERS else answer
        return replace(self.question, labels=(answer, digits))

    async def ask_one(self, *samples: Sample) -> Answer:
        """The geometric mean over the questions."""
        (sample,) = samples
        p: list[float] = []
        # one after the other: the server's prefix cache then holds the image from the second question on
        for question, right in read_column(sample.meta, "vqa_list", _QUESTIONS, "[question, answer] pairs"):
            answer = await self.answer_to(self.expecting(right), sample, asked=question)
            if answer.value is None:
                return Answer(None, answer.reason)
            p.append(answer.value)
        value = math.exp(math.fsum(map(math.log, p)) / len(p)) if all(p) else 0.0
        return Answer(value, parts={str(k): v for k, v in enumerate(p, start=1)})

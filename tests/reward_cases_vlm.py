"""A judge that answers every shipped template from the brightness of the images, and the rewards that query a judge.

`speak` detects which answer format a question requests and writes exactly that format, so a template whose
instructions do not match its parser fails.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from judge_server import JudgeServer
from reward_cases import Case
from tiny_media import grey

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import Sample


def clip(level: float, frames: int = 33) -> Media:
    """A clip that gets slightly brighter with each frame."""
    return Media(np.stack([np.full((32, 32, 3), level + k, np.uint8) for k in range(frames)]))


def grid(*levels: float, cols: int = 2, size: int = 16) -> Media:
    """An image of uniformly grey cells, row by row, without gaps."""
    cells = np.repeat(np.array(levels, np.uint8)[:, None, None, None], size, 1).repeat(size, 2).repeat(3, 3)
    rows = [np.concatenate(list(cells[k : k + cols]), 1) for k in range(0, len(levels), cols)]
    return Media(np.ascontiguousarray(np.concatenate(rows)))


def split_yes_no(p: float) -> dict[str, float]:
    """Token probabilities with P(Yes) = p, split over several spellings, among other words."""
    p = min(max(p, 0.001), 0.999)
    yes, no = 0.9 * p, 0.9 * (1 - p)
    return {"Yes": 0.6 * yes, " yes": 0.3 * yes, "YES": 0.1 * yes, "No": 0.7 * no, " no": 0.3 * no, "Well": 0.1}


def speak(b: list[float], text: str) -> str | dict[str, float]:
    """The answer to any shipped template; `b`: brightness of each image in [0, 1]."""
    half = len(b) // 2
    kind = "Video" if "Video 1" in text else "Image"
    first = (float(np.mean(b[:half] or [0])) > float(np.mean(b[half:]))) != ("plain black" in text)
    winner = f"{kind} {1 if first else 2}"
    other = f"{kind} {2 if first else 1}"
    if "Alignment Score (1-5)" in text:
        lines = {"Alignment": 1 + 4 * b[0], "Coherence": 1 + 2 * b[0], "**Style": 5 - 4 * b[0]}
        return "\n".join(f"{name} Score (1-5): {value:.2f}" for name, value in lines.items()) + "**"
    if "Final Score:" in text:
        return f"It shows {b[0]:.2f} of it.\nFinal Score: {1 + 4 * b[0]:.2f}"
    if "<Score>" in text:
        return f"<Score>{1 + round(4 * b[0])}</Score>"
    if "[success, restraint]" in text:
        return f'{{"reasoning": "ok", "score": [{25 * b[-1]:.3f}, {25 * b[0]:.3f}]}}'
    if "[naturalness, artefacts]" in text:
        return f'```json\n{{"reasoning": "ok", "score": [{25 * b[0]:.3f}, {25 - 25 * b[0]:.3f}]}}\n```'
    if "cat_winner" in text:
        names = re.findall(r'"(\w+)" \(', text)
        verdicts = [winner, other, "tie"]
        listed = ", ".join(f'{{"name": "{n}", "cat_winner": "{v}"}}' for n, v in zip(names, verdicts, strict=True))
        return f'{{"categories": [{listed}, {{"name": "Mood", "cat_winner": "{winner}"}}], "winner": "{winner}"}}'
    if "</answer>" in text:
        return f"<think>{kind} 1 is {b[0]:.2f}, {other} is better lit.</think>\n<answer>{winner} is better</answer>"
    if "Edited image 1 is better" in text:
        near = abs(b[-2] - b[0]) < abs(b[-1] - b[0])
        return f"Weighing both, {'first' if near else 'second'}.\nEdited image {1 if near else 2} is better."
    if "Yes or No" in text:
        if "Theme:" in text:
            scale = 0.5 if "Criterion: strict" in text else 1.0
            return split_yes_no(scale * (1 - abs(b[0] - b[1])))
        return split_yes_no(1 - abs(b[0] - b[-1]) if "everything else consistent" in text else b[-1])
    if "<score>[1, 0]</score>" in text:
        points = re.findall(r"^\d+\. ", text, re.M)
        return (
            f"<analysis>['a', 'b']</analysis>\n<score>{[int(b[0] > 0.2 * (k + 1)) for k in range(len(points))]}</score>"
        )
    if "single word" in text:
        return {"two": 0.7 * b[0] + 0.1, "Yes": 0.2 - 0.15 * b[0], "no": 0.05}
    raise AssertionError(f"no answer for {text[:200]}")


def judge(server: JudgeServer, **changes: Any) -> dict[str, Any]:
    """The `judge` section of a recipe, as a mapping."""
    return {"endpoints": [server.url], "image_format": "png", "timeout_s": 10.0} | changes


def _served(_: Path) -> dict[str, Any]:
    server = JudgeServer()
    server.answer = speak
    return {"judge": judge(server.__enter__())}


def pictures(prompt: str = "a 2x2 grid of cats", **meta: Any) -> list[Sample]:
    """Four samples of different brightness, each a grid of four cells."""
    levels = [(40, 60, 90, 130), (200, 180, 90, 80), (10, 20, 30, 40), (250, 240, 10, 100)]
    return [Sample(prompt, grid(*four), (grey(128),), meta) for four in levels]


def points() -> list[Sample]:
    """Samples with two test points; they satisfy none, one and both."""
    dims = {"Testpoints": ["Style", "Attribute - Color"], "Testpoint Description": ["ink", "red"]}
    return [Sample("red ink", grey(level), (), {"sub_dims_en": json.dumps(dims)}) for level in (10, 90, 240)]


def questions() -> list[Sample]:
    """Samples with a question about a number and one about a thing."""
    asked = [["How many cats?", "two"], ["Are there cats?", "Yes"]]
    return [Sample("two cats", grey(level), (), {"vqa_list": asked}) for level in (10, 90, 240)]


SHOWN = (
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
CASES = dict.fromkeys(SHOWN, Case(_served, pictures))
CASES["unigenbench"] = Case(_served, points)
CASES["soft_tifa"] = Case(_served, questions)
CASES["unifiedreward_edit_pointwise_image_quality"] = Case(
    lambda folder: _served(folder) | {"weights": {"artifacts": 0.5}},
    pictures,  # its two scores move in opposite directions
)

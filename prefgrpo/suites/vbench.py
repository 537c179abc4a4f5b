"""VBench (arXiv 2311.17982): 946 prompts × 5 clips (25 for temporal flickering); 16 dimensions.

    PROMPT-K.mp4      NAME_eval_results.json: {dimension: [score, [score of a clip, …]]}
    normalised = (score − low) / (high − low);   quality, semantic: weighted means;   total = (4·quality + semantic) / 5

Its tools need conflicting versions (transformers 4.33, numpy < 2, detectron2), so they run in a separate environment;
their results are read here. Limits and weights are from scripts/constant.py of Vchitect/VBench.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, Json, TypeAdapter

from prefgrpo.data.file_names import file_name
from prefgrpo.data.prompts import DataError, Prompt, read_prompts
from prefgrpo.suites.base import Number, Results, Row, SampleFile, Suite, check, read_text

QUALITY = {
    "subject_consistency": (0.1462, 1.0),
    "background_consistency": (0.2615, 1.0),
    "temporal_flickering": (0.6293, 1.0),
    "motion_smoothness": (0.706, 0.9975),
    "aesthetic_quality": (0.0, 1.0),
    "imaging_quality": (0.0, 1.0),
    "dynamic_degree": (0.0, 1.0),
}
SEMANTIC = {
    "object_class": (0.0, 1.0),
    "multiple_objects": (0.0, 1.0),
    "human_action": (0.0, 1.0),
    "color": (0.0, 1.0),
    "spatial_relationship": (0.0, 1.0),
    "scene": (0.0, 0.8222),
    "appearance_style": (0.0009, 0.2855),
    "temporal_style": (0.0, 0.364),
    "overall_consistency": (0.0, 0.364),
}
"""Dimension → (lowest, highest) score."""
WEIGHTS = {"dynamic_degree": 0.5}
"""Weights of dimensions other than 1."""
FLICKERING, FLICKERING_SAMPLES = "temporal_flickering", 25
"""This dimension discards clips without motion, so it needs more clips."""


@dataclass(frozen=True)
class _Row:
    """A prompt in VBench_full_info.json."""

    prompt_en: Annotated[str, Field(pattern=r"\S")]
    dimension: list[str]


_ROWS: TypeAdapter[list[_Row]] = TypeAdapter(Json[Annotated[list[_Row], Field(min_length=1)]])
_SCORES: TypeAdapter[dict[str, tuple[float, Any]]] = TypeAdapter(Json[dict[str, tuple[Number, list[Any]]]])
"""Dimension → (score, the scores of its clips)."""


class VBench(Suite):
    """VBench."""

    title = "VBench"
    source = "vbench/VBench_full_info.json (or prompts/all_dimension.txt: five clips of each) of Vchitect/VBench"
    samples = 5
    takes = "video"
    results_source = "the *_eval_results.json of its evaluate.py, or a folder of several"
    shares_files = True

    def read(self, path: Path) -> list[Prompt]:
        """From the JSON with dimensions, or from a plain list."""
        if path.suffix != ".json":
            return read_prompts(path, unique=False)
        rows = check(_ROWS, read_text(path, self.source), path, self.source)
        return [Prompt(k, row.prompt_en, {"dimension": row.dimension}) for k, row in enumerate(rows)]

    def sample_files(self, prompts: Sequence[Prompt], samples: int, out: Path, ending: str) -> list[SampleFile]:
        """videos/PROMPT-3.mp4"""
        flickering = [FLICKERING in p.meta.get("dimension", ()) for p in prompts]
        counts = [samples or (FLICKERING_SAMPLES if f else self.samples) for f in flickering]
        numbered = [(p, k) for p, count in zip(prompts, counts, strict=True) for k in range(count)]
        return [(p, k, out / "videos" / file_name(p, k, "vbench", ending)) for p, k in numbered]

    def read_results(self, path: Path) -> Results:
        """Normalised scores, and their means if all dimensions are present."""
        files = sorted(path.glob("**/*_eval_results.json")) if path.is_dir() else [path]
        scores: dict[str, float] = {}
        for file in files:
            found = check(_SCORES, read_text(file, self.results_source), file, self.results_source)
            scores |= {name: score for name, (score, _) in found.items()}
        limits = QUALITY | SEMANTIC
        if not scores.keys() & limits.keys():
            raise DataError(f"--results: {path}: expected {self.results_source}; found no dimension of VBench")
        normalised = {n: (scores[n] - low) / (high - low) for n, (low, high) in limits.items() if n in scores}
        quality, semantic = _weighted_mean(normalised, QUALITY), _weighted_mean(normalised, SEMANTIC)
        total = None if quality is None or semantic is None else (4 * quality + semantic) / 5
        tables = {
            title: [Row(n, values.get(n), int(n in values), int(n not in values)) for n in limits]
            for title, values in (("dimension, normalised", normalised), ("dimension, as scored", scores))
        }
        by = f"Read from {path.name}, written by the suite's own evaluation."
        summary = {"total": total, "quality": quality, "semantic": semantic}
        missing = [f"no score of {name}" for name in limits if name not in scores]
        return Results(self.title, by, summary, tables, missing)


def _weighted_mean(values: dict[str, float], names: dict[str, tuple[float, float]]) -> float | None:
    """The weighted mean; None unless all dimensions are present."""
    if names.keys() - values.keys():
        return None
    weights = {name: WEIGHTS.get(name, 1.0) for name in names}
    return sum(weights[name] * values[name] for name in names) / sum(weights.values())

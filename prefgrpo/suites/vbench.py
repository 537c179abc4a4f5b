"""VBench (arXiv 2311.17982): 946 prompts × 5 clips (25 for temporal flickering); 16 dimensions.

    PROMPT-K.mp4      NAME_eval_results.json: {dimension: [score, [score of a clip, …]]}
    normalised = (score − low) / (high − low);   quality, semantic: weighted means;   total = (4·quality + semantic) / 5

Its tools need conflicting versions (transformers 4.33, numpy < 2, detectron2), so they run in a separate environment;
their results are read here. Limits and weights are from scripts/constant.py of Vchitect/VBench.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, Json, TypeAdapter

from prefgrpo.data.file_names import file_name
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.suites.base import Results, Row, Suite, check, read_text

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
FLICKERING = "temporal_flickering"
FLICKERING_SAMPLES = 25
"""This dimension discards clips without motion, so it needs more clips."""


_SCORES: TypeAdapter[dict[str, tuple[float, Any]]] = TypeAdapter(Json[dict[str, tuple[FiniteFloat, list[Any]]]])
"""Dimension → (score, the scores of its clips)."""


class VBench(Suite):
    """VBench."""

    title = "VBench"
    source = "vbench/VBench_full_info.json of Vchitect/VBench"
    samples = 5
    takes = "video"
    results_source = "the *_eval_results.json of its evaluate.py, or a folder of several"
    shares_files = True

    columns = "dimension, a list"

    def owns(self, prompt: Prompt) -> bool:
        """Rows with their dimensions."""
        return isinstance(prompt.meta.get("dimension"), list)

    def samples_of(self, prompt: Prompt) -> int:
        """More clips for flickering."""
        return FLICKERING_SAMPLES if FLICKERING in prompt.meta["dimension"] else self.samples

    def file(self, prompt: Prompt, number: int, ending: str) -> Path:
        """videos/PROMPT-3.mp4"""
        return Path("videos", file_name(prompt, number, "vbench", ending))

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
        quality = _weighted_mean(normalised, QUALITY)
        semantic = _weighted_mean(normalised, SEMANTIC)
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

"""Layout of a run's folder, `output/name`: the only module that knows the names of its files.

config.yaml  config_to_000020.yaml  inputs/  metrics.jsonl  judgements.jsonl, judgements_0001.jsonl  tensorboard/
checkpoints/step_000020/lora/  eval/dev_000050.npz, .json  groups/step_000050.npz  lora/ or pipeline/  report.html
pairs/000123.jsonl, 000123_0.webp  evaluations/step_000020_live/against_base/comparison.json
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from prefgrpo.config.recipe import UserError

PRODUCTS = ("lora", "pipeline")
"""The finished weights in diffusers format: a LoRA, or the whole pipeline after full fine-tuning."""
STATE = "state.json"
"""In a checkpoint, the last file to be written: step, layout, and what the run was started with."""
ABOUT = ".about.json"
"""In a folder of generated files: what they were made with."""
COMPARISON = "comparison.json"
"""In a folder of an evaluation against other weights: the result."""


class RunFolder:
    """The paths of a run."""

    def __init__(self, root: str | Path) -> None:
        self.root = root = Path(root)
        self.lock = root / ".lock"
        self.config = root / "config.yaml"
        self.metrics = root / "metrics.jsonl"
        self.judgements = self.judgements_of(0)
        self.tensorboard = root / "tensorboard"
        self.wandb_id = root / "wandb_id"
        self.checkpoints = root / "checkpoints"
        self.eval = root / "eval"
        self.initial_errors = self.eval / "dev_pairs_before.npz"
        """Errors of the starting policy on held-out pairs."""
        self.groups = root / "groups"
        self.pairs = root / "pairs"
        """All judged groups, with the tracker `pairs`."""
        self.comfy = root / "comfy"
        """The LoRA of checkpoints as single files for ComfyUI."""
        self.report = root / "report.html"
        self.first_lora = root / "inputs" / "lora"
        """The LoRA that the run continues, before its first step."""

    @property
    def place(self) -> dict[str, str]:
        """The fields of a configuration that say where the run is."""
        return {"output": str(self.root.parent), "name": self.root.name}

    def judgements_of(self, rank: int) -> Path:
        """The comparisons that a process asked for; the report shows groups of process 0."""
        return self.root / (f"judgements_{rank:04d}.jsonl" if rank else "judgements.jsonl")

    def all_judgements(self) -> list[Path]:
        """The files of all processes, also of an earlier part of the run."""
        return sorted(self.root.glob("judgements*.jsonl"))

    def input_copy(self, file: str) -> Path:
        """The run's copy of a file of prompts or of a template."""
        return self.root / "inputs" / f"{hashlib.sha256(file.encode()).hexdigest()[:8]}_{Path(file).name}"

    def old_config(self, step: int) -> Path:
        """The configuration up to `step`, of a run that was resumed there with another one."""
        return self.root / f"config_to_{step:06d}.yaml"

    def product(self, lora: bool) -> Path:
        """The finished LoRA or pipeline."""
        return self.root / PRODUCTS[0 if lora else 1]

    def exported(self, checkpoint: Path) -> Path:
        """The LoRA or pipeline of a checkpoint."""
        return self.root / "exports" / checkpoint.name

    def evaluation(self, weights: str, name: str) -> Path:
        """Files and results of `prefgrpo evaluate` with these weights, by suite or by what they are compared with."""
        return self.root / "evaluations" / weights / name

    def initial_image(self, name: str, number: int) -> Path:
        """An image or clip of the starting policy on the evaluation set `name`."""
        return self.eval / f"{name}_before" / f"{number:06d}.npz"

    def prompts(self, name: str) -> Path:
        """The prompts of an evaluation set that the report shows."""
        return self.eval / f"{name}_prompts.json"

    def sources(self, name: str) -> Path:
        """The source images of these prompts, for edits."""
        return self.eval / f"{name}_sources.npz"

    def report_images(self, name: str, step: int) -> Path:
        """Images of an evaluation, before and now."""
        return self.eval / f"{name}_{step:06d}.npz"

    def all_report_images(self, name: str) -> list[Path]:
        """The images of all evaluations, by step."""
        return sorted(self.eval.glob(f"{name}_{'[0-9]' * 6}.npz"))

    def outcomes(self, name: str, step: int) -> Path:
        """Win, tie or loss of every image of an evaluation, and the judge's answers for the stored images."""
        return self.eval / f"{name}_{step:06d}.json"

    def group(self, step: int) -> Path:
        """A few judged groups of a training step."""
        return self.groups / f"step_{step:06d}.npz"

    def all_groups(self) -> list[Path]:
        """The groups of all steps, by step."""
        return sorted(self.groups.glob(f"step_{'[0-9]' * 6}.npz"))

    def pair_table(self, group: int) -> Path:
        """A judged group, as a table of pairs."""
        return self.pairs / f"{group:06d}.jsonl"

    def all_pair_tables(self) -> list[Path]:
        """The tables of all judged groups, by number."""
        return sorted(self.pairs.glob("*.jsonl"))

    def pair_image(self, group: int, which: str) -> Path:
        """An image of a judged group: a member, or a source image."""
        return self.pairs / f"{group:06d}_{which}.webp"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after a step."""
        return self.checkpoints / f"step_{step:06d}"

    def all_checkpoints(self) -> list[Path]:
        """Every checkpoint, by step."""
        folders = [p for p in self.checkpoints.glob("step_*") if p.is_dir() and re.fullmatch(r"step_\d+", p.name)]
        return sorted(folders, key=step_of)

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        steps = self.all_checkpoints()
        return steps[-1] if steps else None

    def checkpoint_of(self, path: Path) -> Path:
        """The checkpoint that a path names: itself, or for the run's folder the newest one. Raises UserError."""
        wanted = path if path.resolve().parent.name == "checkpoints" else self.latest()
        existing = ", ".join(p.name for p in self.all_checkpoints())
        if wanted is None or not existing:
            raise UserError(f"{self.root} has no checkpoint")
        if not wanted.is_dir():
            raise UserError(f"{wanted} does not exist; the checkpoints of {self.root}: {existing}")
        return wanted


def run_of(path: Path) -> RunFolder | None:
    """The run that a run folder or a checkpoint folder belongs to; None for anything else."""
    root = path.resolve().parent.parent if path.resolve().parent.name == "checkpoints" else path
    run = RunFolder(root if root.name else root.resolve())
    return run if run.config.is_file() else None


def step_of(path: Path) -> int:
    """The step number in the file name of a checkpoint, of evaluation images or of groups."""
    return int(path.stem.rpartition("_")[2])

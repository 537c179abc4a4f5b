"""Whole trainings on one GPU, one JSON line per trial: `python -m benchmarks.experiments.trials PART` (gpu_check.sh).

    families   every family, tiny, in bf16: LoRA and all weights, 2 steps, resumed to 3; the first ratio must be 1
    train      FLUX.1-dev at its true size with random weights, loaded once: the recipe lora_flux at 720², and 1024²
               with recomputation; seconds per phase, FLOP, MFU, and peak memory beside what start and --dry-run said
    peers      a quarter of FLUX.1-dev at 1024² and 512²: Pref-GRPO's own step beside ours (pref_grpo.py)

The lines are also written to benchmarks/results/PART_DEVICE.json, with the machine. A trial that fails is a line with
its error, and makes the exit code 1; the next one runs. Every training of `families` has a process of its own, because
an illegal memory access ends whatever runs in its process; the trials of `train` and `peers` share one, and a pipeline.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.bench_judge import machine
from benchmarks.blocks import rounded, write_json
from benchmarks.experiments import pref_grpo
from prefgrpo.commands.dry_run import dry_run
from prefgrpo.config.rewards import entries
from prefgrpo.models.attention import attention_of_a_run
from prefgrpo.models.base import Adapter
from prefgrpo.run.log import Clock
from prefgrpo.tiny import pipelines
from prefgrpo.trainer import Trainer
from prefgrpo.update.memory import GIB, peak_memory

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "scripts" / "prefgrpo/lora_flux.yaml"
RESULTS = ROOT / "benchmarks" / "results"
PROMPTS = ("a red cube left of a blue ball", "a street in the rain at night", "two cats asleep on a piano")
PUBLISHED: dict[str, dict[str, Any]] = {
    "transformer": {
        "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
        "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
        "axes_dims_rope": (16, 56, 56), "guidance_embeds": True,
    },
    "vae": {
        "block_out_channels": (128, 256, 512, 512), "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 2, "latent_channels": 16,
        "norm_num_groups": 32, "sample_size": 1024,
    },
    "text_encoder": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
    "text_encoder_2": {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64},
}  # fmt: skip
"""FLUX.1-dev's configuration, but for the number of the text encoders' layers."""
TRIALS: dict[str, tuple[int, float]] = {"720": (720, 0.0), "1024, recomputed": (1024, 1.0)}
"""Trial of `train` → side in pixels and share of the blocks that are recomputed."""


def flux(changes: dict[str, dict[str, Any]], device: str, dtype: torch.dtype) -> Any:
    """The tiny FLUX.1 pipeline with changed configurations of its components; random weights, frozen."""
    parts = dict(pipelines.FLUX)
    for name, values in changes.items():
        kind, config = parts[name]
        parts[name] = (kind, config | values)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            pipe = pipelines.build("FluxPipeline", parts)
    finally:
        torch.set_default_dtype(torch.float32)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def brightness(images: Any, prompts: Any, **columns: Any) -> list[float]:
    """A reward that needs nothing: the mean pixel."""
    return [float(image.mean()) / 255 for image in images]


def _error(error: BaseException) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {str(error)[:400]}"}


# ---- families -------------------------------------------------------------------------------------------------------


def train_family(job: tuple[str, str, str]) -> dict[str, Any]:
    """Train (family, "LoRA" or "all weights") in a folder, stop after 2 steps, and resume to 3."""
    family, kind, place = job
    torch.set_num_threads(1)
    begin = time.perf_counter()
    steps: list[dict[str, float]] = []
    line: dict[str, Any] = {"family": family, "trained": kind}
    model = pipelines.make(family, Path(place) / f"{family} {kind}")
    try:
        for last in (2, 3):
            trainer = Trainer(
                str(model),
                train_prompts=str(next(model.glob("prompts.*"))),
                rewards=brightness,
                steps=last,
                lora_rank=4 if kind == "LoRA" else 0,
                resume=last == 3,
                on_step=lambda step, metrics: steps.append(metrics),
                name="run",
                output=str(model / "runs"),
                trackers=[],
                dtype="bf16",
                eval={"every": 2, "prompts": 0},
                checkpoint={"every": 2},
                rollout={"prompts_per_step": 2, "group_size": 2, "batch_size": 1},
                train={"gradient_checkpointing": 0.5},
            )
            trainer.train()
        line["on_policy_error"] = max(row["policy/on_policy_error"] for row in steps)
        line["updates_skipped"] = sum(row["updates_skipped"] for row in steps)
        if len(steps) != 3 or line["on_policy_error"] or line["updates_skipped"]:
            line["error"] = f"expected 3 steps with a first ratio of exactly 1 and no update skipped, got {len(steps)}"
    except BaseException as error:  # noqa: BLE001  (the line of this trial; the next one runs)
        line |= _error(error)
    return line | {"seconds": time.perf_counter() - begin}


def _alone(job: tuple[str, str, str]) -> dict[str, Any]:
    """`train_family` in a pool of its own: a process that dies breaks its whole pool."""
    family, kind, _ = job
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(train_family, job).result()
    except Exception as error:  # noqa: BLE001  (the line of this trial; the next one runs)
        return {"family": family, "trained": kind} | _error(error)


def families(place: Path, names: Sequence[str], processes: int) -> Iterator[dict[str, Any]]:
    """A line for each family, trained as a LoRA and with all weights, in the order in which they end."""
    jobs = [(name, kind, str(place)) for name in names for kind in ("LoRA", "all weights")]
    with ThreadPoolExecutor(processes) as threads:
        for ended in as_completed([threads.submit(_alone, job) for job in jobs]):
            yield ended.result()


# ---- train ----------------------------------------------------------------------------------------------------------


@contextmanager
def loaded(pipe: Any) -> Iterator[None]:
    """Context in which every model is this pipeline, given back without LoRA and recomputation, also after an error."""
    try:
        with mock.patch.object(Adapter, "read", lambda *place: pipe):
            yield
    finally:
        pipe.unload_lora_weights()
        for module in pipe.transformer.modules():
            module.__dict__.pop("forward", None)


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def trainer_of(
    pipe: Any, model: Path, work: Path, side: int, group: int, batch: int, recomputed: float, **more: Any
) -> Trainer:
    """A run of the recipe lora_flux at `side`² pixels: 3 steps of one prompt, with an update for each batch."""
    on_cpu = pipe.transformer.device.type == "cpu"
    return Trainer.from_recipe(
        RECIPE,
        str(model),
        train_prompts=list(PROMPTS),
        rewards=brightness,
        steps=3,
        output=str(work),
        trackers=[],
        dtype="fp32" if on_cpu else "bf16",
        eval={"every": 0},
        checkpoint={"every": 10**6},
        data={"cache": str(work / "cache"), "max_length": 24 if on_cpu else 512},
        rollout={
            "height": side, "width": side, "prompts_per_step": 1, "group_size": group, "batch_size": batch,
            "steps": pref_grpo.STEPS, "window_high": pref_grpo.STEPS - 1, "window_size": pref_grpo.TRAINED,
        },
        train={"updates_per_rollout": group // batch, "gradient_checkpointing": recomputed},
        **more,
    )  # fmt: skip


def train_flux(pipe: Any, model: Path, work: Path, label: str, side: int, recomputed: float) -> dict[str, Any]:
    """One trial: --dry-run, then 3 steps of which the first is not timed."""
    device = pipe.transformer.device.type
    line: dict[str, Any] = {"trial": label, "side": side, "recomputed": recomputed}
    steps: list[dict[str, float]] = []
    try:
        with loaded(pipe):
            callback = {"on_step": lambda step, metrics: steps.append(metrics)}
            run = trainer_of(pipe, model, work, side, 2, 2, recomputed, name=label, **callback)
            config = run.config
            line["said at start"] = [note for note in run.notes if note.startswith("memory ")]
            _reset_peak(device)
            run.train()
            line["peak GiB"] = peak_memory(pipe.transformer.device) / GIB
        rows = steps[1:]
        for key in ("time/rollout", "time/update", "time/images_per_s", "time/mfu"):
            if key in rows[0]:
                line[key] = statistics.median(row[key] for row in rows)
        line["on_policy_error"] = max(row["policy/on_policy_error"] for row in steps)
        line["TFLOP per image"] = {kind: flop / 1e12 for kind, flop in run.throughput.per_sample.items()}
        del run
        _reset_peak(device)
        said = io.StringIO()
        prompts = work / "prompts.txt"
        prompts.write_text("\n".join(PROMPTS))
        with loaded(pipe), redirect_stdout(said):
            dry_run(_with_prompts(config, prompts))
        line["--dry-run GiB"] = float(re.findall(r"peak memory ([\d.]+) GiB", said.getvalue())[0])
        if line["on_policy_error"]:
            line["error"] = "the first ratio is not exactly 1"
    except BaseException as error:  # noqa: BLE001  (the line of this trial; the next one runs)
        line |= _error(error)
    return line


def _with_prompts(config: Any, file: Path) -> Any:
    """A configuration whose prompts are a file, and whose reward has a name, as `--dry-run` reads them."""
    data = replace(config.data, prompts=str(file))
    return replace(config, data=data, rewards=entries("jpeg_compressibility"))


def train(
    place: Path, changes: dict[str, dict[str, Any]], device: str, sides: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A line for the time to load FLUX.1, and one for each of TRIALS; sides: other sizes."""
    model = pipelines.make("flux", place / "flux")  # where the family is read from; its weights are not used
    begin = time.perf_counter()
    pipe = flux(changes, device, torch.bfloat16 if device == "cuda" else torch.float32)
    size = sum(p.numel() for p in pipe.transformer.parameters())
    yield {"trial": "load", "parameters": size, "seconds": time.perf_counter() - begin}
    for (label, (side, recomputed)), other in zip(TRIALS.items(), sides or [0] * len(TRIALS), strict=True):
        yield train_flux(pipe, model, place, label, other or side, recomputed)


# ---- peers ----------------------------------------------------------------------------------------------------------


def our_step(pipe: Any, model: Path, work: Path, side: int, batch: int) -> float:
    """Seconds of our training step with as much work as `pref_grpo.their_step`."""
    sizes = (side, pref_grpo.GROUP, batch, 1.0)
    with loaded(pipe):
        trainer = trainer_of(pipe, model, work, *sizes, name=f"{side} {batch}", lora_rank=pref_grpo.RANK)
        try:
            return pref_grpo.timed_steps(pipe.transformer, lambda step: trainer.step(step, Clock()))
        finally:
            trainer.close()


def peers(
    place: Path, changes: dict[str, dict[str, Any]], device: str, sides: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A line for every size and trainer."""
    if not (Path(os.environ.get("PREFGRPO_PEERS", "")) / "Pref-GRPO").is_dir():
        yield {"skipped": "PREFGRPO_PEERS names no folder with a checkout Pref-GRPO"}
        return
    model = pipelines.make("flux", place / "flux")
    pipe = flux(changes, device, torch.bfloat16 if device == "cuda" else torch.float32)
    text = 512 if device == "cuda" else 24
    for side in sides or (1024, 512):
        ways: dict[str, Callable[[], float]] = {
            "Pref-GRPO": partial(pref_grpo.their_step, pipe, side, text),
            "prefgrpo, batches of 2": partial(our_step, pipe, model, place, side, 2),
            "prefgrpo, batches of 4": partial(our_step, pipe, model, place, side, 4),
        }
        for name, measure in ways.items():
            _reset_peak(device)
            line: dict[str, Any] = {"trainer": name, "side": side}
            try:
                with attention_of_a_run():
                    line |= {"seconds": measure(), "peak GiB": peak_memory(pipe.transformer.device) / GIB}
            except BaseException as error:  # noqa: BLE001  (the line of this trial; the next one runs)
                line |= _error(error)
            yield line


# ---- the command line -----------------------------------------------------------------------------------------------


def report(part: str, device: str, lines: Iterator[dict[str, Any]], out: Path | None) -> int:
    """Print every line and write it to a file as soon as it is there, and return 1 if one has an error."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    facts = {"machine": machine(), "torch": torch.__version__, "gpu": gpu}
    found: list[dict[str, Any]] = []
    for line in lines:
        found.append(rounded(line))
        print(json.dumps(found[-1]), flush=True)
        write_json(out or RESULTS / f"{part}_{device}.json", facts | {"trials": found})
    return int(any("error" in line for line in found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("families", "train", "peers"))
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU: tiny FLUX of 32 and 64 pixels")
    parser.add_argument("--names", nargs="+", default=list(pipelines.FAMILIES), help="of families")
    parser.add_argument("--processes", type=int, default=8, help="families trained at a time")
    parser.add_argument("--out", type=Path, help="the JSON; default results/PART_DEVICE.json")
    given = parser.parse_args(arguments)
    device = "cpu" if given.tiny or not torch.cuda.is_available() else "cuda"
    changes = {} if given.tiny else PUBLISHED
    sides = [32, 64] if given.tiny else []
    fewer = {"transformer": PUBLISHED["transformer"] | {"num_layers": 5, "num_single_layers": 10}}
    quarter = changes | fewer if changes else {"vae": {"latent_channels": 16}, "transformer": {"in_channels": 64}}
    with tempfile.TemporaryDirectory() as place:
        parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "families": lambda: families(Path(place), given.names, given.processes),
            "train": lambda: train(Path(place), changes, device, sides),
            "peers": lambda: peers(Path(place), quarter, device, sides),
        }
        return report(given.part, device, parts[given.part](), given.out)


if __name__ == "__main__":
    sys.exit(main())

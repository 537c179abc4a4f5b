"""`python -m benchmarks.bench_train [--device cuda]`: time and memory of a LoRA step at FLUX.1-dev's true size.

The transformer and the VAE have the published configuration and random weights, which are as fast as trained ones; the
text encoders have the published widths and two layers, since training reads an embedding cache. For each image size, a
new process trains `scripts/prefgrpo/lora_flux.yaml` on its own with small groups; the reward is the images' JPEG size,
so that there is no wait for a judge. Written to results/train_DEVICE.json: seconds per phase, images per second, the
allocator's peak, and MFU.

MFU = (forward FLOP of the rollout + forward and backward FLOP of the trained steps, without recomputation) / seconds
/ FLOP/s of one large bf16 matrix product, timed in the same run; torch counts the FLOP. `step_over_model` is a step's
seconds divided by those in model forwards and backwards: on CPUs CPU seconds on one thread, so that other load does not
count, and unless `--model` is given, the model is FLUX.1 with six blocks of width 256 (WIDE).
Invariant: `prefgrpo train` is timed unchanged.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from benchmarks.bench_judge import machine
from benchmarks.blocks import rounded, write_json
from prefgrpo.config.loading import load
from prefgrpo.run.notes import GIB
from prefgrpo.tiny import pipelines

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "scripts" / "prefgrpo/lora_flux.yaml"
RESULTS = ROOT / "benchmarks" / "results"
aten = torch.ops.aten
FLOP: dict[Any, Any] = {
    aten.addmm_: flop_registry[aten.addmm],
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Formulas that torch lacks: of the LoRA layers and of CPU attention."""
PROMPTS = ("a red cube left of a blue ball", "a street in the rain at night", "two cats asleep on a piano")


PUBLISHED: dict[str, dict[str, Any]] = {
    "transformer": {
        "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
        "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
        "axes_dims_rope": (16, 56, 56),
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
WIDE: dict[str, dict[str, Any]] = {
    "transformer": {
        "in_channels": 64, "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 64,
        "num_attention_heads": 4, "axes_dims_rope": (16, 24, 24),
    },
    "vae": {"latent_channels": 16},
}  # fmt: skip
"""FLUX.1 with six blocks of width 256 and 16 latent channels."""


def flux(changes: dict[str, dict[str, Any]], device: str, dtype: torch.dtype) -> Any:
    """The tiny FLUX.1 pipeline with changed configurations of its components; random weights."""
    parts = dict(pipelines.FLUX)
    for name, values in changes.items():
        kind, config = parts[name]
        parts[name] = (kind, config | values)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return pipelines.build("FluxPipeline", parts)
    finally:
        torch.set_default_dtype(torch.float32)


def recipe(model: Path, work: Path, side: int, steps: int) -> Path:
    """Write the shipped recipe with the benchmark's changes to a file; returns its path."""
    changed = {
        "extends": str(RECIPE), "model": str(model), "output": str(work / "runs"), "name": f"at{side}",
        "rewards": "jpeg_compressibility", "eval": {"every": 0},
        "data": {"prompts": str(work / "prompts.txt"), "cache": str(work / "cache")},
        "rollout": {
            "height": side, "width": side, "steps": 10, "window_high": 9, "window_size": 4, "prompts_per_step": 1,
            "group_size": 4, "batch_size": 4,
        },
        "train": {"steps": steps, "updates_per_rollout": 1}, "checkpoint": {"every": steps},
    }  # fmt: skip
    file = work / f"at{side}.yaml"
    file.write_text(json.dumps(changed))
    return file


def run(command: str, file: Path) -> int:
    """Run `prefgrpo COMMAND` in this process; returns its peak memory in bytes. Raises RuntimeError if it fails."""
    from prefgrpo.commands.cli import main
    from prefgrpo.run.notes import peak_memory

    if code := main([command, str(file)]):
        raise RuntimeError(f"prefgrpo {command} ended with {code}")
    return peak_memory(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


def apart(command: str, file: Path) -> int:
    """`run` in a new process, so that its peak memory is measured separately."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, command, file).result()


def flop(loop: Any) -> dict[str, float]:
    """FLOP of one sample's forward, and of its forward and backward without recomputation."""
    batch = next(loop.rollouts(0, lambda *sample: None))
    step = batch.steps[0]
    adapter = loop.adapter
    r = loop.config.rollout
    sigma = batch.schedule.times[step.index].expand(len(step.x))

    def count(trained: bool) -> float:
        counter = FlopCounterMode(display=False)
        counter.flop_registry |= FLOP
        with counter, torch.set_grad_enabled(trained):
            v = adapter.velocity(step.x, sigma, batch.condition, r)
            if trained:
                v.float().square().mean().backward()
        return counter.get_total_flops() / len(step.x)

    forward = count(False)
    recomputed = loop.config.train.gradient_checkpointing * forward
    return {"forward": forward, "train": count(True) - recomputed}


def matmul_flops(device: str, size: int, rounds: int = 20) -> float:
    """FLOP/s of a bf16 matrix product of `size`², median of the rounds."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(rounds + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds[3:])


def measure(model: Path, work: Path, side: int, device: str, steps: int, peak_flops: float) -> dict[str, Any]:
    """Measure one image size; medians over the steps after the first."""
    file = recipe(model, work, side, steps)
    config = load(file)
    peak = apart("train", file)
    rows = [json.loads(line) for line in (work / "runs" / f"at{side}" / "metrics.jsonl").read_text().splitlines()]
    trained = [r for r in rows if r["kind"] == "train"][1:]
    phases = [k for k in trained[0] if k.startswith("time/") and k.count("/") == 1]
    seconds = {k: statistics.median(r[k] for r in trained) for k in phases}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        over_model, counted = pool.submit(step_over_model, file, device, steps).result()
    r = config.rollout
    samples = r.prompts_per_step * r.group_size
    work_done = samples * (r.steps * counted["forward"] + r.window_size * counted["train"])
    whole = sum(seconds.values())
    return {
        "side": side, "samples": samples, "steps": r.steps, "trained_steps": r.window_size, "batch": r.batch_size,
        "seconds": {k.removeprefix("time/"): v for k, v in seconds.items()}, "images_per_s": samples / whole,
        "step_over_model": over_model, "flop_per_sample": counted, "mfu": work_done / whole / peak_flops,
        "peak_gib": peak / GIB,
    }  # fmt: skip


def alone_s(device: str) -> float:
    """A clock for this process's own work: CPU time, or on a GPU the time after a synchronisation."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def step_over_model(file: Path, device: str, steps: int) -> tuple[float, dict[str, float]]:
    """(median, over the steps after the first, of a step's seconds divided by those in model forwards and backwards;
    `flop`)."""
    from prefgrpo.run.log import Clock
    from prefgrpo.trainer import Trainer

    torch.set_num_threads(1)
    config = load(file)
    loop = Trainer(replace(config, name=f"{config.name}-share"))
    inside = 0.0
    depth = 0

    def timed(work: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal inside, depth
            depth = depth + 1
            begin = alone_s(device)
            try:
                return work(*given, **named)
            finally:
                depth -= 1
                inside += 0.0 if depth else alone_s(device) - begin

        return call

    pipe = loop.adapter.pipe
    backward = torch.Tensor.backward
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.forward = timed(part.forward)
    pipe.vae.decode = timed(pipe.vae.decode)
    torch.Tensor.backward = timed(backward)  # type: ignore[method-assign]
    ratios = []
    for step in range(steps):
        inside = 0.0
        begin = alone_s(device)
        loop.step(step, Clock())
        ratios.append((alone_s(device) - begin) / inside)
    torch.Tensor.backward = backward  # type: ignore[method-assign]
    counted = flop(loop)
    loop.close()
    return statistics.median(ratios[1:]), counted


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", type=Path, help="a FLUX.1 pipeline folder instead of random weights")
    parser.add_argument("--sides", type=int, nargs="+", default=[512, 1024], help="image sizes")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run; the first is not timed")
    parser.add_argument("--matmul", type=int, default=8192, help="size of the matrix product timed for MFU")
    parser.add_argument("--out", type=Path, default=None, help="the JSON; default results/train_DEVICE.json")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = given.model or Path(folder) / "model"
        (work / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
        flops = matmul_flops(given.device, given.matmul)
        if given.model is None and given.device == "cpu":
            flux(WIDE, "cpu", torch.float32).save_pretrained(model)
        elif given.model is None:
            flux(PUBLISHED, given.device, torch.bfloat16).save_pretrained(model, max_shard_size="5GB")
            torch.cuda.empty_cache()
        apart("preprocess", recipe(model, work, given.sides[0], given.steps))
        found = {
            "machine": machine(), "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name() if given.device == "cuda" else None,
            "matmul_tflops": flops / 1e12,
            "model": str(given.model or ("wide" if given.device == "cpu" else "FLUX.1-dev, random weights")),
            "runs": [measure(model, work, side, given.device, given.steps, flops) for side in given.sides],
        }  # fmt: skip
    write_json(given.out or RESULTS / f"train_{given.device}.json", rounded(found))
    print(json.dumps(rounded(found), indent=1))


if __name__ == "__main__":
    main()

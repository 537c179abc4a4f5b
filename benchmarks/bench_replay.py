"""`python -m benchmarks.bench_replay`: what `train.replay_batch` saves: seconds of an update whose stored steps are
replayed at once, over those of one step at a time.

FLUX with random weights: the tiny pipeline, and a transformer of width 512 with 2 + 4 blocks. Four samples, four stored
steps, forward and backward with a LoRA; median of the rounds, whose two kinds alternate. On a CPU seconds are those of
this process, on one thread, whatever else runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from prefgrpo import models
from prefgrpo.config.schema import SamplingConfig
from prefgrpo.models.base import Adapter
from prefgrpo.models.condition import collate
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.rollout.replay import replay, stacked
from prefgrpo.rollout.rollout import rollout
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.tiny import pipelines

BATCH, STEPS = 4, (0, 1, 2, 3)
WIDE = {"num_layers": 2, "num_single_layers": 4, "attention_head_dim": 64, "num_attention_heads": 8}
WIDE |= {"axes_dims_rope": (16, 24, 24)}


def seconds(adapter: Adapter, side: int, rounds: int) -> dict[int, float]:
    """Median seconds of an update per `replay_batch`: 0 and all steps at once."""
    sampling = SamplingConfig(side, side, 6)
    condition = collate(Embeddings(adapter, 32)(["a red cube"] * BATCH, sampling), adapter.device)
    schedule = make_schedule(adapter.sigmas(sampling), "flow", 0.7, STEPS).to(adapter.device)
    ids = torch.arange(BATCH, device=adapter.device)
    steps = rollout(adapter, schedule, condition, ids, sampling, seed=0).steps
    taken: dict[int, list[float]] = {0: [], BATCH * len(STEPS): []}
    cuda = adapter.device.type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    for _ in range(rounds + 1):
        for replay_batch, times in taken.items():
            begin = clock()
            for step in stacked(adapter, schedule, steps, sampling, replay_batch):
                replay(adapter, schedule, condition, step, sampling).logp.sum().backward()
            if cuda:
                torch.cuda.synchronize()
            times.append(clock() - begin)
    return {replay_batch: statistics.median(times[1:]) for replay_batch, times in taken.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per model and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sides", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pipelines.make("flux", folder)
        for name, changes in {"tiny": {}, "wide": WIDE}.items():
            adapter = models.load("flux", folder, torch.float32, torch.device(args.device))
            if changes:
                config = dict(adapter.transformer.config) | changes
                adapter.transformer = adapter.pipe.transformer = type(adapter.transformer).from_config(config)
                adapter.transformer.requires_grad_(False).to(args.device)
            adapter.add_lora(8, 16.0)
            for side in args.sides:
                alone, together = seconds(adapter, side, args.rounds).values()
                count, tokens = sum(p.numel() for p in adapter.transformer.parameters()), adapter.tokens
                print(
                    f"{name}: {count / 1e6:.1f} M parameters, {tokens(SamplingConfig(side, side))} tokens: "
                    f"{alone:.3f} s one at a time, {together:.3f} s at once, ratio {together / alone:.2f}"
                )


if __name__ == "__main__":
    main()

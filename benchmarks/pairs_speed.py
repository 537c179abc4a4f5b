"""CPU time per trained pair: a step with `data.pairs` beside the published loop of Diffusion-DPO for flow matching.

    python -m benchmarks.pairs_speed            # prints the table; --write puts it into docs/benchmarks.md

The published loop (arXiv 2311.12908; its train.py, diffusers' train_diffusion_dpo.py) is written here plainly with
diffusers and peft: every step reads and encodes both images and the prompt, and forwards the pair under the policy and
under the reference, which is the model with its adapters disabled. The second variant of it has latents and text
embeddings in memory. All have one pair per forward (train_batch_size 1, as its launchers), the same model, LoRA layers,
AdamW, pairs per update and dtype fp32; they take turns, on one thread. Before timing, the first loss of each must be
log 2, as policy and reference are equal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from peft import LoraConfig
from PIL import Image
from torch import Tensor
from torch.nn.functional import logsigmoid

from benchmarks.bench_judge import cpu_name
from benchmarks.blocks import replace_block
from prefgrpo.run.log import Clock
from prefgrpo.tiny import ASSETS, FOLDER
from prefgrpo.trainer import Trainer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
MODEL = ASSETS / "base"
LAYERS = (
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff.net.0.proj",
    "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out",
)  # fmt: skip
"""Layers with a LoRA, as in the demo; proj_out only of the single blocks."""
SIZE = 32
TOKENS = 12
BETA = 100.0
PAIRS = 16
"""Pairs per update."""
RANK = 16


def make_pairs(folder: Path) -> Path:
    """A table of PAIRS pairs of images of noise, with captions of the demo."""
    rng = np.random.default_rng(0)
    captions = (FOLDER / "assets" / "prompts" / "train.txt").read_text().splitlines()
    rows = []
    for k in range(PAIRS):
        row = {"prompt": captions[k]}
        for kind in ("chosen", "rejected"):
            row[kind] = f"{k}_{kind}.png"
            Image.fromarray(rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)).save(folder / row[kind])
        rows.append(json.dumps(row))
    table = folder / "pairs.jsonl"
    table.write_text("\n".join(rows))
    return table


class Published:
    """The published loop; cached: with latents and text embeddings made once."""

    def __init__(self, table: Path, cached: bool) -> None:
        self.folder = table.parent
        self.rows = [json.loads(line) for line in table.read_text().splitlines()]
        self.pipe = FluxPipeline.from_pretrained(MODEL, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        self.net = self.pipe.transformer.requires_grad_(False)
        wrapped = [name for name, _ in self.net.named_modules() if name.endswith(LAYERS) and name != "proj_out"]
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights="gaussian", target_modules=wrapped)
        self.net.add_adapter(config)
        self.weights = [weight for weight in self.net.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-4)
        self.inputs = [self.encode(row) for row in self.rows] if cached else []

    @torch.no_grad()
    def encode(self, row: dict[str, str]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(latents [2, L, 4C] of chosen and rejected, prompt_embeds [1, n, D], pooled [1, E], text ids)."""
        images = [Image.open(self.folder / row[kind]).convert("RGB") for kind in ("chosen", "rejected")]
        pixels = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]) / 127.5 - 1
        vae = self.pipe.vae
        latents = (vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
        packed = self.pipe._pack_latents(latents, *latents.shape)
        return packed, *self.pipe.encode_prompt(row["prompt"], prompt_2=None, max_sequence_length=TOKENS)

    def forward(self, x: Tensor, t: Tensor, embeds: Tensor, pooled: Tensor, text_ids: Tensor) -> Tensor:
        """Velocity [2, L, 4C]."""
        side = math.isqrt(x.shape[1])
        given = {
            "hidden_states": x,
            "timestep": t.expand(2),
            "guidance": torch.full((2,), 3.5),
            "pooled_projections": pooled.expand(2, -1),
            "encoder_hidden_states": embeds.expand(2, -1, -1),
            "txt_ids": text_ids,
            "img_ids": self.pipe._prepare_latent_image_ids(2, side, side, x.device, x.dtype),
        }
        out: Tensor = self.net(**given, return_dict=False)[0]
        return out

    def loss(self, k: int) -> Tensor:
        """Loss of pair k, at one t and noise for its two images."""
        encoded = self.inputs[k] if self.inputs else self.encode(self.rows[k])
        latents, *text = encoded
        noise = torch.randn_like(latents[:1])
        t = torch.randn(1).sigmoid()
        x = (1 - t) * latents + t * noise
        goal = noise - latents
        error = (self.forward(x, t, *text) - goal).square().mean((1, 2))
        with torch.no_grad():
            self.net.disable_adapters()
            reference = (self.forward(x, t, *text) - goal).square().mean((1, 2))
            self.net.enable_adapters()
        chosen, rejected = error - reference
        return -logsigmoid(-0.5 * BETA * (chosen - rejected))

    def step(self) -> float:
        """One update; its mean loss."""
        total = 0.0
        for k in range(PAIRS):
            loss = self.loss(k) / PAIRS
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Ours:
    """Steps of a run on the same table, with everything encoded before."""

    def __init__(self, table: Path) -> None:
        folder = table.parent
        self.trainer = Trainer(
            str(MODEL),
            steps=10_000,
            lora_rank=RANK,
            rewards=[],
            dtype="fp32",
            trackers=[],
            output=str(folder / "runs"),
            data={"pairs": str(table), "max_length": TOKENS, "cache": str(folder / "cache")},
            rollout={
                "height": SIZE, "width": SIZE, "steps": 8, "group_size": 2, "batch_size": 2, "prompts_per_step": PAIRS,
            },
            train={
                "objective": "dpo", "objective_options": {"beta": BETA, "times": "logit_normal"}, "lr": 1e-4,
                "lora_alpha": 2 * RANK, "lora_targets": list(LAYERS),
            },
            eval={"every": 0},
        )  # fmt: skip
        self.trainer.interrupt.install()
        self.number = 0

    def step(self) -> float:
        """One training step; its mean loss."""
        metrics = self.trainer.step(self.number, Clock())
        self.number += 1
        return metrics["loss"]


def measure(rounds: int) -> dict[str, list[float]]:
    """Variant → CPU milliseconds per pair in every round; a first step of each is not timed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        table = make_pairs(Path(place))
        ours = Ours(table)
        plain = Published(table, cached=False)
        cached = Published(table, cached=True)
        steps: dict[str, Callable[[], float]] = {"ours": ours.step, "published": plain.step, "cached": cached.step}
        for name, step in steps.items():
            first = step()
            if abs(first - math.log(2)) > 1e-4:
                raise RuntimeError(f"{name}: expected log 2 as the loss of the first step, got {first}")
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                begin = time.process_time()
                step()
                taken[name].append(1e3 * (time.process_time() - begin) / PAIRS)
        ours.trainer.close()
    return taken


def table_of(taken: dict[str, list[float]]) -> list[str]:
    """The lines of the table."""
    names = {
        "ours": "`data.pairs`, latents and texts in `data.cache`",
        "published": "published loop, which encodes images and texts in every step",
        "cached": "published loop with latents and texts in memory",
    }
    best = float(np.median(taken["ours"]))
    lines = ["| per trained pair | CPU ms (quartiles) | of ours |", "|---|---:|---:|"]
    for name, text in names.items():
        low, median, high = np.quantile(taken[name], (0.25, 0.5, 0.75))
        lines.append(f"| {text} | {median:.1f} ({low:.1f}-{high:.1f}) | {median / best:.2f} × |")
    return lines


def about() -> str:
    """The machine, in a line."""
    load = os.getloadavg()[0]
    return f"{cpu_name()}, one thread, load average {load:.0f} at the start, CPU time, torch {torch.__version__}."


def main(argv: list[str] | None = None) -> None:
    """Print the table, and write it with --write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="of one step of each")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    given: Any = parser.parse_args(argv)
    head = about()
    lines = [head, "", *table_of(measure(given.rounds))]
    print(*lines, sep="\n")
    if given.write:
        replace_block(PAGE, "pairs speed", lines)


if __name__ == "__main__":
    main()

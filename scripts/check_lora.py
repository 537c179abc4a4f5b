#!/usr/bin/env python
"""Does stock diffusers render what the trainer rendered? Reads a run folder; needs no prefgrpo.

    python scripts/check_lora.py runs/demo

Loads the run's base model with its stock pipeline, puts RUN/lora on it with `load_lora_weights` (after full
fine-tuning: loads RUN/pipeline), and renders the prompts of RUN/proof.safetensors from the initial latents kept
there. Prints the largest difference to the trainer's own images, in [0, 1]. A model given by a relative folder is
looked for from where you are. Exit code: 0 up to --tolerance, 1 above it, 2 if it cannot run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import DiffusionPipeline
from safetensors import safe_open


def read_proof(file: Path) -> tuple[dict[str, str], torch.Tensor, torch.Tensor]:
    """(facts, initial latents, float images [B, 3, H, W]) that the trainer wrote."""
    with safe_open(file, "pt") as proof:
        return proof.metadata(), proof.get_tensor("latents"), proof.get_tensor("images")


def load(run: Path, facts: dict[str, str], device: str) -> Any:
    """The stock pipeline with the run's result in it."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config["dtype"]]
    full = (run / "pipeline").is_dir()
    pipe = DiffusionPipeline.from_pretrained(run / "pipeline" if full else facts["model"], dtype=dtype)
    if not full:
        if (run / "lora" / "pytorch_lora_weights.safetensors").is_file():
            pipe.load_lora_weights(str(run / "lora"))
        if (run / "lora" / "transformer_2").is_dir():  # the second expert of Wan2.2
            pipe.load_lora_weights(str(run / "lora" / "transformer_2"), load_into_transformer_2=True)
    shift = json.loads(facts["shift"])
    if shift is not None:
        fixed = dict(pipe.scheduler.config) | {"shift": shift, "use_dynamic_shifting": False}
        pipe.scheduler = type(pipe.scheduler).from_config(fixed)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def largest_difference(run: Path, device: str) -> float:
    """Largest absolute difference of any pixel, images in [0, 1]."""
    facts, latents, images = read_proof(run / "proof.safetensors")
    pipe = load(run, facts, device)
    call = {"latents": latents.to(device), "output_type": "pt", "return_dict": False} | json.loads(facts["call"])
    (out, *_) = pipe(json.loads(facts["prompts"]), **call)
    return float((out.float().cpu() - images).abs().max())


def main() -> int:
    """Check one run folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder, e.g. runs/demo")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest difference allowed (default 1e-5)")
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")
    args = parser.parse_args()
    missing = [name for name in ("config.yaml", "proof.safetensors") if not (args.run / name).is_file()]
    if missing:
        print(
            f"error: {args.run} has no {' and no '.join(missing)}; expected a run that finished with evaluation on "
            "(eval.prompts or eval.final_prompts)",
            file=sys.stderr,
        )
        return 2
    difference = largest_difference(args.run, args.device)
    verdict = "the same images" if difference <= args.tolerance else "NOT the same images"
    print(f"max |stock diffusers - trainer| = {difference:.2e} (allowed {args.tolerance:.0e}): {verdict}")
    return 0 if difference <= args.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())

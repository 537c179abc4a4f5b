#!/usr/bin/env python
"""Check that stock diffusers reproduces the trainer's images. Reads a run folder; does not need prefgrpo.

    python scripts/check_lora.py runs/demo

Loads the run's base model with its stock pipeline, adds RUN/lora with `load_lora_weights` (after full fine-tuning it
loads RUN/pipeline instead), and generates the prompts of RUN/proof.safetensors from the initial latents (and, for
edits, the source images) stored there. Prints the largest difference from the trainer's images, in [0, 1]. A relative
model path is resolved from the working directory. Exit code: 0 up to --tolerance, 1 above it, 2 if the check cannot
run. The tolerance of bf16 runs is 0.05: tiny models of seven families differed by .006 to .035 after 6 steps, because
the stock pipeline rounds in a different order. The difference without the LoRA is then printed for comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import diffusers
import torch
import yaml
from PIL import Image
from safetensors import safe_open

TOLERANCE = {"fp32": 1e-5, "bf16": 0.05}
"""Largest allowed difference, by the run's dtype."""


def read_proof(file: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """(metadata, tensors) of the trainer: initial `latents`, float `images` [B, (F,) 3, H, W], source images."""
    with safe_open(file, "pt") as proof:
        return proof.metadata(), {key: proof.get_tensor(key) for key in proof.keys()}  # noqa: SIM118


def dtype_of(run: Path) -> str:
    """fp32 or bf16."""
    return str(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["dtype"])


def load(run: Path, metadata: dict[str, str], device: str, lora: bool = True) -> Any:
    """The stock pipeline with the run's trained weights; lora=False: the base model only."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_of(run)]
    full = (run / "pipeline").is_dir()
    cls, folder = getattr(diffusers, metadata["pipeline"]), run / "pipeline" if full else Path(metadata["model"])
    index = json.loads((folder / "model_index.json").read_text()) if folder.is_dir() else {}
    disabled = {name: None for name, part in index.items() if part == [None, None]}  # SD3 without T5
    revision = None if full else metadata.get("revision")
    pipe = cls.from_pretrained(str(folder), dtype=dtype, revision=revision, **disabled)
    if lora and not full:
        weights = "pytorch_lora_weights.safetensors"
        if not hasattr(pipe, "load_lora_weights"):  # HunyuanVideo-1.5's
            pipe.transformer.load_lora_adapter(str(run / "lora"), weight_name=weights)
        elif (run / "lora" / weights).is_file():
            pipe.load_lora_weights(str(run / "lora"))
        if (run / "lora" / "transformer_2").is_dir():  # the second expert of Wan2.2
            pipe.load_lora_weights(str(run / "lora" / "transformer_2"), load_into_transformer_2=True)
    scheduler_config = json.loads(metadata["scheduler"])
    pipe.scheduler = getattr(diffusers, scheduler_config["class"]).from_config(scheduler_config["config"])
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def fix_schedule(scheduler: Any, sigmas: torch.Tensor, timesteps: torch.Tensor) -> None:
    """Make an Euler scheduler use these sigmas and timesteps [T], whatever the pipeline requests."""
    stock = scheduler.set_timesteps

    def set_timesteps(num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, mu: Any = None) -> None:
        stock(sigmas=fixed[0], timesteps=fixed[1], device=device)

    fixed = sigmas.tolist(), timesteps.tolist()
    scheduler.set_timesteps = set_timesteps


def largest_difference(run: Path, device: str, lora: bool = True) -> float:
    """Largest absolute pixel difference from the trainer's images, in [0, 1]; lora=False: for the base model."""
    metadata, tensors = read_proof(run / "proof.safetensors")
    pipe, prompts = load(run, metadata, device, lora), json.loads(metadata["prompts"])
    latents = tensors["latents"].to(device)
    if "sigmas" in tensors:
        fix_schedule(pipe.scheduler, tensors["sigmas"], tensors["timesteps"])
    call = {"output_type": "pt", "return_dict": False} | json.loads(metadata["call"])
    if hasattr(pipe, "guider"):  # HunyuanVideo-1.5: not call arguments; its VAE decodes one clip at a time
        pipe.guider = pipe.guider.new(guidance_scale=call.pop("guidance_scale"))
        pipe.tokenizer_max_length = call.pop("tokenizer_max_length")
        pipe.vae.enable_slicing()
    if hasattr(pipe, "audio_vae"):  # LTX-2: the audio tokens follow the video tokens
        frames = (call["num_frames"] - 1) // pipe.vae_temporal_compression_ratio + 1
        count = frames * call["height"] * call["width"] // pipe.vae_spatial_compression_ratio**2
        audio_latents = latents[:, count:] * pipe.audio_vae.latents_std + pipe.audio_vae.latents_mean
        latents, call["audio_latents"] = latents[:, :count], audio_latents
    depends_on_batch = type(pipe).__name__ == "QwenImage21Pipeline"  # on the lengths of all its prompts
    if depends_on_batch or any(key.startswith("source_") for key in tensors):
        out = torch.cat([generate_one(pipe, call, i, prompt, latents, tensors) for i, prompt in enumerate(prompts)])
    else:
        out = pipe(prompt=prompts, latents=latents, **call)[0]
    if out.dim() == 4 and out.shape[1] == 4:  # Qwen-Image-2.1's images have an alpha channel
        out = out[:, :3] * out[:, 3:] + (1 - out[:, 3:])
    return float((out.float().cpu() - tensors["images"]).abs().max())


def generate_one(
    pipe: Any, call: dict[str, Any], i: int, prompt: str, latents: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The image of prompt i, from its source images if any; stock pipelines edit one prompt at a time."""
    names = sorted((key for key in tensors if key.startswith(f"source_{i}_")), key=lambda key: int(key.split("_")[2]))
    images = [Image.fromarray(tensors[name].numpy()) for name in names]
    call = {key: value[:1] if isinstance(value, list) else value for key, value in call.items()}
    image = {} if not images else {"image": images if len(images) > 1 else images[0]}
    return pipe(prompt=[prompt], latents=latents[i : i + 1], **image, **call)[0]


def main() -> int:
    """Check one run folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder, e.g. runs/demo")
    allowed = "largest allowed difference (default 1e-5 in fp32, 0.05 in bf16)"
    parser.add_argument("--tolerance", type=float, help=allowed)
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")
    args = parser.parse_args()
    missing = [name for name in ("config.yaml", "proof.safetensors") if not (args.run / name).is_file()]
    if missing:
        expected = "expected a run that finished with evaluation on (eval.prompts or eval.final_prompts)"
        print(f"error: {args.run} has no {' and no '.join(missing)}; {expected}", file=sys.stderr)
        return 2
    metadata, _ = read_proof(args.run / "proof.safetensors")
    if json.loads(metadata["source_area"]) is not None:
        print("error: the run set rollout.source_area, which stock pipelines do not support", file=sys.stderr)
        return 2
    dtype = dtype_of(args.run)
    allowed = TOLERANCE[dtype] if args.tolerance is None else args.tolerance
    difference = largest_difference(args.run, args.device)
    verdict = "the same images" if difference <= allowed else "NOT the same images"
    print(f"max |stock diffusers - trainer| = {difference:.2e} (allowed in {dtype}: {allowed:.0e}): {verdict}")
    if dtype == "bf16" and (args.run / "lora").is_dir():
        base = largest_difference(args.run, args.device, lora=False)
        note = "" if base > allowed else ": this LoRA changes less than bf16 rounds, so the check says little about it"
        print(f"max |stock diffusers without the LoRA - trainer| = {base:.2e}{note}")
    return 0 if difference <= allowed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Estimates the time of a training step: a recipe's, from its FLOP, and this build's next to an older one's.

    python -m benchmarks.step_time scripts/prefgrpo/lora_wan_480p_small.yaml --gpus 8
    seconds = FLOP of the step's forwards and backwards / (GPUs × rate)   + decoding

    python -m benchmarks.step_time        # FLUX.1 at 1024² and Wan 14B at 480p, change by change since 376d3a9f
    seconds = Σ FLOP of products / rate + FLOP of attention / rate + bytes of everything else / rate + transfers

FLOP and bytes are counted on blocks on the meta device; rates were measured on one H100 or are marked as assumed, and
nothing here ran on several GPUs. Not counted: text encoding, rewards, waiting for judges, image files, FSDP2.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.block_costs import (
    ATTENTION,
    FORWARDS,
    MODELS,
    OURS,
    OWN,
    PRODUCTS,
    Counter,
    as_on_a_gpu,
    block_of,
    inputs_of,
    published,
)
from prefgrpo.config.loading import load
from prefgrpo.config.schema import Config
from prefgrpo.models import family

ROLLOUT = 358e12
UPDATE = 329e12
"""FLOP per second and GPU, measured."""
DECODE_S = 4.4
"""Seconds per clip of 480×832×81 in the VAE, at most, measured on the same GPU; other sizes by their pixels."""
PIXELS = 480 * 832 * 81
BACKWARD = {"linear": 1.0, "attention": 2.5}
"""FLOP of a backward by those of the forward: of frozen weights, only for their inputs."""


def wan(config: Config) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The 14B denoiser of Wan2.1, and the inputs of a forward of one clip."""
    r = config.rollout
    frames = ((r.frames or 81) - 1) // 4 + 1
    x = torch.zeros(1, 16, frames, r.height // 8, r.width // 8)
    text = torch.zeros(1, config.data.max_length, 4096)
    inputs = {"hidden_states": x, "timestep": torch.zeros(1), "encoder_hidden_states": text}
    return diffusers.WanTransformer3DModel(), inputs


def flux(config: Config) -> tuple[torch.nn.Module, dict[str, Any]]:
    """FLUX.1-dev, and the inputs of a forward of one image."""
    tokens = config.rollout.height // 16 * (config.rollout.width // 16)
    length = config.data.max_length
    shapes = {
        "hidden_states": (1, tokens, 64), "encoder_hidden_states": (1, length, 4096), "pooled_projections": (1, 768),
        "timestep": (1,), "guidance": (1,), "img_ids": (tokens, 3), "txt_ids": (length, 3),
    }  # fmt: skip
    inputs = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return diffusers.FluxTransformer2DModel(guidance_embeds=True), inputs


DENOISERS: dict[str, Callable[[Config], tuple[torch.nn.Module, dict[str, Any]]]] = {"wan": wan, "flux": flux}


def forward_flop(config: Config) -> tuple[float, float]:
    """FLOP of a forward of one sample: (all but attention, attention)."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        net, inputs = DENOISERS[config.family](config)
        net(**inputs)
    counts = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counts.items() if "bmm" in str(op))  # without a device it is two products
    return float(sum(counts.values()) - attention), float(attention)


def step_seconds(config: Config, gpus: int) -> dict[str, float]:
    """Seconds of the parts of a step."""
    r = config.rollout
    t = config.train
    linear, attention = forward_flop(config)
    forward = linear + attention
    cfg = family(config.family).cfg
    forwards = r.steps * (2 if cfg is not None and cfg.active(r.guidance) else 1)
    trained = r.window_size or (r.window_high or r.steps - 1) - r.window_low
    back = linear * BACKWARD["linear"] + attention * BACKWARD["attention"]
    of_update = forward * (1 + t.gradient_checkpointing + (t.kl_coef > 0)) + back
    samples = r.prompts_per_step * r.group_size / gpus
    clip = DECODE_S * r.height * r.width * (r.frames or 0) / PIXELS
    return {
        "denoising": samples * forwards * forward / ROLLOUT,
        "decoding": samples * clip,
        "update": samples * forwards * trained / r.steps * of_update / UPDATE,
    }


# ---- change by change
FLASH_2 = (ATTENTION, 320e12)
"""FLOP/s of FlashAttention-2, forward and backward; the latter is assumed, as in arXiv:2407.08608's figures."""
FLASH_3 = (650e12, 520e12)
"""The same of FlashAttention-3 and -4: assumed, as that paper's figures for heads of 128 and long sequences."""
NVLINK = 330e9
"""Bytes/s that a process sends in an all-to-all of 8 GPUs: assumed, of NVLink 4's 450 GB/s each way (data sheet)."""


class Passes(NamedTuple):
    """Bytes of a sample's forward and backward outside products and attention, LoRA included, and their rate."""

    forward: float
    backward: float
    rate: float


DIFFUSERS_ULYSSES = ((12, 4), (16, 4))
"""(copies of a tensor [B, S, C], all-to-alls that nothing hides) of one attention, forward and backward; counted on a
process group without processes, diffusers 0.42.1."""
OWN_ULYSSES = ((2, 2), (2, 2))
"""The same of models/blocks/ulysses.py: v and the output are copied; q and k travel while v is projected, forward and
back."""
TODAY = {
    "FLUX.1": Passes(69.2e9, 131.3e9, OURS),
    "Wan 14B": Passes(1917.7e9, 2831.5e9, OWN),
}
"""At 376d3a9f, counted by `passes`; under Ulysses it ran diffusers' blocks."""
FUSED_THEN = {"Wan 14B": Passes(601.3e9, 1099.1e9, OURS)}
"""Its fused blocks, the same."""
WAN = (5120, 13824)
"""Channels of the 14B model and of its feed-forward, as in diffusers' defaults."""
WITHOUT_LORA = {"FLUX.1": 44e9}
"""Bytes of its forward as it was timed (FORWARDS): what they do not explain is added to every forward and backward."""


class Work(NamedTuple):
    """What one sample takes part in."""

    model: str
    name: str
    processes: int
    """Number of processes that share it."""
    steps: int
    trained: int
    guided: bool
    reference: bool
    """Whether a reference forward is computed for a KL, and blocks are recomputed."""
    decoding: float
    """Decoding, in GPU-seconds."""


WORKS = (
    Work("FLUX.1", "FLUX.1 at 1024², 16 steps, 4 trained, per image", 1, 16, 4, False, False, 0.05),
    Work("Wan 14B", "Wan 14B at 480p, guidance, KL, recomputed, 20 steps, 11 trained, per clip on 8 GPUs", 8, 20, 11,
         True, True, DECODE_S),
)  # fmt: skip


class Build(NamedTuple):
    """How a version of this package runs."""

    passes: Passes
    attention: tuple[float, float] = FLASH_2
    ulysses: tuple[tuple[int, int], tuple[int, int]] = DIFFUSERS_ULYSSES
    keeps_attention: bool = False
    repeats_last: bool = True
    """Whether recomputation repeats the last product of a block."""


DENOISER = {model.name: model for model in MODELS}


def following(out: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the next block, whose streams differ in length."""
    streams = [out] if isinstance(out, Tensor) else [t for t in out if t is not None]
    by_length = {t.shape[1]: t.detach().requires_grad_() for t in streams}
    names = ("hidden_states", "encoder_hidden_states")
    return inputs | {n: by_length[inputs[n].shape[1]] for n in names if inputs[n].shape[1] in by_length}


def passes(name: str, recomputed: bool) -> tuple[Counter, Counter]:
    """What forward and backward of this version's fused blocks with a LoRA take, of one sample."""
    model = DENOISER[name]
    net = published(model)
    total = Counter(), Counter()
    for kind in model.kinds:
        inputs = inputs_of(model, kind, net.get_submodule(kind.place))
        with block_of(net, kind, True) as block:
            block.checkpointed = recomputed  # type: ignore[assignment]
            with as_on_a_gpu():  # casts the LoRA, and makes streams as all blocks but the first have them
                inputs = following(block(**inputs), inputs)
            with as_on_a_gpu() as both:
                out = block(**inputs)
                ahead = Counter()
                ahead.add(both, 1)
                outputs = [out] if isinstance(out, Tensor) else list(out)
                given = [t for t in inputs.values() if isinstance(t, Tensor) and t.requires_grad]
                given += [p for p in block.parameters() if p.requires_grad]
                torch.autograd.grad(outputs, given, [torch.empty_like(t) for t in outputs], allow_unused=True)
        both.add(ahead, -1)
        for all_blocks, one in zip(total, (ahead, both), strict=True):
            all_blocks.add(one, model.count(kind))
    return total


def unexplained(work: Work, cost: Counter) -> float:
    """Seconds of a measured forward that its FLOP and bytes do not explain."""
    if work.model not in WITHOUT_LORA:
        return 0.0
    known = cost.products / PRODUCTS + cost.attention / ATTENTION + WITHOUT_LORA[work.model] / OURS
    return FORWARDS["fused, the prototype"] / 2 - known


def times(work: Work, cost: Counter, build: Build) -> dict[str, float]:
    """GPU-seconds of a sample's forward, backward, and recomputation; cost: of its forward."""
    model = DENOISER[work.model]
    latents, text = model.kinds[0].tokens
    blocks = sum(model.count(kind) for kind in model.kinds)
    rest = unexplained(work, cost)
    products = cost.products / PRODUCTS
    attention = [cost.attention / build.attention[0], 2.5 * cost.attention / build.attention[1]]
    split = [0.0, 0.0]
    if work.processes > 1:
        tensor = latents * WAN[0] * 2.0  # bf16
        sent = tensor * (1 - 1 / work.processes) / NVLINK
        copy = 2 * tensor / build.passes.rate
        split = [blocks * (copies * copy + waits * sent) for copies, waits in build.ulysses]
    moved = [build.passes.forward / build.passes.rate, build.passes.backward / build.passes.rate]
    forward = products + attention[0] + moved[0] + split[0] + rest
    backward = products + attention[1] + moved[1] + split[1] + rest
    again = forward
    if build.keeps_attention:  # that to the text runs again
        again -= attention[0] * latents / (latents + text)
    if not build.repeats_last:
        again -= blocks * 2.0 * latents * math.prod(WAN) / PRODUCTS
    return {"forward": forward, "backward": backward, "recomputation": again * work.reference}


def sample_seconds(work: Work, cost: Counter, build: Build) -> dict[str, float]:
    """Seconds of a sample, on the processes that share it."""
    one = times(work, cost, build)
    pair = (1 + work.guided) / work.processes
    update = one["forward"] * (1 + work.reference) + one["recomputation"] + one["backward"]
    return {
        "rollout": pair * work.steps * one["forward"],
        "decoding": work.decoding / work.processes,
        "update": pair * work.trained * update,
    }


def builds(work: Work) -> Iterator[tuple[str, Build, Counter]]:
    """The older version, then with one change after another, up to this one: (what changed, build, its forward)."""
    forward, backward = passes(work.model, work.reference)
    build = Build(TODAY[work.model])
    yield "376d3a9f", build, forward
    if work.model in FUSED_THEN:
        build = build._replace(passes=FUSED_THEN[work.model])
        yield "fused blocks under Ulysses", build, forward
    build = build._replace(attention=FLASH_3)
    yield "FlashAttention-3 or -4", build, forward
    if work.reference:
        build = build._replace(keeps_attention=True)
        yield "attention is kept", build, forward
        build = build._replace(repeats_last=False)
        yield "the last product is not repeated", build, forward
    if work.processes > 1:
        build = build._replace(ulysses=OWN_ULYSSES)
        yield "own layout for Ulysses", build, forward
    build = build._replace(passes=Passes(forward.bytes, backward.bytes, OURS))
    yield "less traffic: GELU, joined streams, LoRA", build, forward


def table(work: Work) -> list[str]:
    """A row per change, in seconds of a sample."""
    rows = [f"{work.name}:", "| with | forward, GPU-s | backward | rollout, s | update | sum | ratio |"]
    rows.append("|---|---:|---:|---:|---:|---:|---:|")
    first = 0.0
    for name, build, cost in builds(work):
        one = times(work, cost, build)
        parts = sample_seconds(work, cost, build)
        whole = sum(parts.values())
        first = first or whole
        sizes = f"{one['forward']:.3f} | {one['backward']:.3f} | {parts['rollout']:.2f} | {parts['update']:.2f}"
        rows.append(f"| {name} | {sizes} | {whole:.2f} | {whole / first:.2f} |")
    return rows


def main() -> None:
    """Print the parts of recipes' steps in minutes; without a recipe, the changes since 376d3a9f."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", nargs="*")
    parser.add_argument("--gpus", type=int, default=8)
    given = parser.parse_args()
    if not given.recipe:
        print("\n\n".join("\n".join(table(work)) for work in WORKS))
    for recipe in given.recipe:
        config = load(recipe)
        parts = step_seconds(config, given.gpus)
        listed = " + ".join(f"{name} {seconds / 60:.1f}" for name, seconds in parts.items())
        print(f"{config.name} on {given.gpus} GPUs: {listed} = {sum(parts.values()) / 60:.0f} min per step")


if __name__ == "__main__":
    main()

"""What a run prints before its first step: what is trained, on which prompts, and the memory that this takes.

Memory is counted on the loaded model, on this process's device: weights, optimiser, and a step's stored samples.
Activations, encoded texts and in-process rewards come on top; `prefgrpo train RECIPE --dry-run` prints the real peak.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from prefgrpo.config.schema import Config
from prefgrpo.data.prompts import FEWEST_TO_SPLIT, Prompt
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.world import World
from prefgrpo.rollout.batch import assign_batches, busy_share
from prefgrpo.run.comparison import MIN_PROMPTS
from prefgrpo.run.fits import static_bytes, stored_bytes, whole_gradients
from prefgrpo.run.judging import unread_columns
from prefgrpo.run.loading import Collector
from prefgrpo.run.policy import Policy

GIB = 2**30
MIB = 2**20


def start_notes(
    config: Config, world: World, collector: Collector, policy: Policy, prompts: int, held: Mapping[str, int]
) -> Iterator[str]:
    """Lines about a run with this number of training prompts and, by evaluation set, of held-out prompts."""
    adapter = collector.adapter
    r = config.rollout
    t = config.train
    trained = "full"
    if t.lora_rank:
        trained = f"LoRA rank {adapter.lora_rank}" + f" from {t.lora_from}" * bool(t.lora_from)
    frames = adapter.frames(r)
    media = f"clips of {frames} frames" if frames else "images"
    size = sum(p.numel() for _, p in adapter.trainable()) / 1e6
    yield (
        f"{config.family} from {config.model}: training {size:.2f} M parameters ({trained}, {config.dtype}) on "
        f"{world.size} × {world.device}; {r.prompts_per_step} prompts × {r.group_size} {media} "
        f"{r.width}×{r.height} per step from {prompts} prompts"
    )
    if held:
        counts = ", ".join(f"{count} prompts ({name})" for name, count in held.items())
        few = f"; fewer than {MIN_PROMPTS}, so no result will be conclusive" * (max(held.values()) < MIN_PROMPTS)
        yield f"evaluated every {config.eval.every} steps: {counts}{few}"
    else:
        few = f"fewer than {FEWEST_TO_SPLIT} prompts are not split"
        yield f"no evaluation, so no before/after comparison: eval.every or eval.prompts is 0, or {few}"
    if warning := idle_warning(config, world.dp_size):
        yield warning
    yield memory_line(adapter, policy, step_bytes(config, collector, policy, world))


def prompt_warnings(config: Config, trained: Sequence[Prompt], evaluated: Sequence[Prompt]) -> Iterator[str]:
    """Warnings about columns that nothing reads, and about evaluation prompts that are trained on."""
    if unread := unread_columns(config, trained):
        yield f"WARNING: nothing reads the column(s) {', '.join(unread)} of {config.data.prompts}"
    known = {(prompt.text, prompt.source) for prompt in trained}
    if count := sum((prompt.text, prompt.source) in known for prompt in evaluated):
        yield f"WARNING: {count} of {len(evaluated)} evaluation prompts are in {config.data.prompts} and trained on too"


def idle_warning(config: Config, dp_size: int) -> str:
    """A message about idle processes if the batches of an update cannot be assigned evenly; '' if they can."""
    share = 1 - busy_share(config, dp_size)
    if not share:
        return ""
    batches = Counter(batch.update for batch in assign_batches(config))
    counts = " or ".join(str(count) for count in sorted(set(batches.values())))
    return (
        f"an update has {counts} batches of {config.rollout.batch_size} samples for {dp_size} processes, which "
        f"are idle {share:.0%} of it; choose a rollout.batch_size that makes the number a multiple of {dp_size}"
    )


def step_bytes(config: Config, collector: Collector, policy: Policy, world: World) -> dict[str, int]:
    """Bytes per kind that a step holds besides, before activations: its stored samples, and whole gradients."""
    stored = stored_bytes(config, collector.adapter.latent_shape(config.rollout), world.layout, world.size)
    return {"stored samples": stored, "whole gradients": whole_gradients(policy) if collector.reduce_once else 0}


def memory_line(adapter: Adapter, policy: Policy, step: dict[str, int]) -> str:
    """`static_bytes` and what a step holds besides as one line of text."""
    parts = static_bytes(adapter, policy) | step
    total = sum(parts.values())
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    listed = " + ".join(f"{kind} {size / unit:.3g}" for kind, size in parts.items() if size)
    return f"memory per process before activations: {listed} = {total / unit:.3g} {name}"


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process so far: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

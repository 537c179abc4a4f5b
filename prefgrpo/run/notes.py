"""Lines that a run prints: before its first step, what is trained and on which prompts; once, notes on its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch.nn.attention import current_flash_attention_impl

from prefgrpo.config.loading import differences
from prefgrpo.config.schema import Config
from prefgrpo.data.prompts import FEWEST_TO_SPLIT, Prompt
from prefgrpo.models import blocks, family
from prefgrpo.models.base import Adapter
from prefgrpo.models.fp8 import Fp8Linear, multiplies_in_fp8
from prefgrpo.parallel.attention_backend import backend, masked
from prefgrpo.parallel.world import World
from prefgrpo.rewards import load_class
from prefgrpo.rollout.assignment import assign_batches, busy_prompts, busy_share
from prefgrpo.run.measures import MIN_PROMPTS
from prefgrpo.update.gradients import Gradients
from prefgrpo.update.memory import kept_attention, memory_line, step_bytes
from prefgrpo.update.policy import Policy, learning_rate


def start_notes(
    config: Config, world: World, gradients: Gradients, policy: Policy, prompts: int, held: Mapping[str, int]
) -> Iterator[str]:
    """Lines about a run with this number of training prompts and, by evaluation set, of held-out prompts."""
    adapter = gradients.adapter
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
    yield from sampler_notes(config)
    if held:
        counts = ", ".join(f"{count} prompts ({name})" for name, count in held.items())
        few = f"; fewer than {MIN_PROMPTS}, so no result will be conclusive" * (max(held.values()) < MIN_PROMPTS)
        yield f"evaluated every {config.eval.every} steps: {counts}{few}"
    else:
        few = f"fewer than {FEWEST_TO_SPLIT} prompts are not split"
        yield f"no evaluation, so no before/after comparison: eval.every or eval.prompts is 0, or {few}"
    if warning := idle_warning(config, world.dp_size):
        yield warning
    kept = kept_attention(config, adapter, world.layout)
    yield memory_line(adapter, policy, step_bytes(config, gradients, policy, world), kept)
    yield from kernel_notes(config, adapter, world)


def sampler_notes(config: Config) -> list[str]:
    """A line for a family that is evaluated with another sampler than it is trained with; none for the others."""
    cls = family(config.family)
    if not cls.stock_sampler:
        return []
    others = f"the stock call's {cls.stock_sampler}: docs/evaluation.md"
    if cls.cfg is not None and cls.cfg.active(config.eval_sampling.guidance):
        return [f"sampler: rollouts have plain guidance, evaluation and `generate` also {others}"]
    return [f"sampler: guidance is off, and with it, in evaluation and `generate` too, {others}"]


def change_notes(before: Config, now: Config, done: int) -> list[str]:
    """The values that a resumed run changes after `done` steps, and what its learning rate becomes if it decays; none
    if nothing changes."""
    changed = differences(before, now)
    notes = [f"changed since: {field} {old} → {new}" for field, (old, new) in changed.items()]
    t = now.train
    falls = t.lr_scheduler != "constant" and done < t.steps
    if falls and changed.keys() & {"train.steps", "train.lr", "train.lr_scheduler"}:
        old, new = (learning_rate(train, done * train.updates_per_rollout) for train in (before.train, t))
        changed_rate = f"learning rate of step {done + 1}: {new:.3g} instead of {old:.3g}"
        notes.append(f"{changed_rate}; it now falls to 0 at the end of step {t.steps} ({t.lr_scheduler})")
    return notes


def kernel_notes(config: Config, adapter: Adapter, world: World) -> Iterator[str]:
    """Which kernels multiply weights in fp8; on a GPU, the attention backend that runs, and how many blocks are
    fused."""
    device = world.device
    if config.fp8_base:
        layers = sum(isinstance(m, Fp8Linear) for net in adapter.modules().values() for m in net.modules())
        products = "products in fp8"
        if not multiplies_in_fp8(device, adapter.dtype):
            products = f"products in {config.dtype}, as torch has none in fp8 here: this saves memory, not time"
        yield f"fp8 base: {layers} layers, {products}"
    if device.type == "cuda":
        name = backend(config.attention, device, adapter.dtype, masked(adapter, world.layout))
        flash = current_flash_attention_impl()
        yield f"attention: {config.attention} runs diffusers' {name}" + f" with {flash}" * bool(flash)
    if device.type in blocks.FUSED_ON and not config.compile:
        modules = adapter.modules().values()
        yield blocks.fusion_note([block for module in modules for block in adapter.blocks(module)])


def _unread_columns(config: Config, prompts: Sequence[Prompt]) -> list[str]:
    """Columns of the prompts that nothing in this run reads; none if a reward of the user's may read any."""
    classes = [load_class(entry.reward) for entry in (*config.rewards, *config.measured)]
    if not all(cls.__module__.startswith("prefgrpo.rewards.") for cls in classes):
        return []
    read = {column for cls in classes for column in (*cls.meta_keys, *cls.reads)}
    guidance = family(config.family).cfg
    if guidance is not None and guidance.active(config.rollout.guidance):
        read.add("negative_prompt")
    return list(dict.fromkeys(column for prompt in prompts for column in prompt.meta if column not in read))


def prompt_notes(config: Config, trained: Sequence[Prompt], evaluated: Sequence[Prompt], absent: int) -> Iterator[str]:
    """Warnings about columns that nothing reads and evaluation prompts that are trained on; how complete data.cache is,
    which lacks `absent` embeddings."""
    file = config.data.pairs or config.data.prompts
    if (unread := _unread_columns(config, trained)) and not config.data.pairs:
        yield f"WARNING: nothing reads the column(s) {', '.join(unread)} of {file}"
    known = {(prompt.text, prompt.source) for prompt in trained}
    if count := sum((prompt.text, prompt.source) in known for prompt in evaluated):
        yield f"WARNING: {count} of {len(evaluated)} evaluation prompts are in {file} and trained on too"
    if config.data.cache:
        state = f"{absent} entries are encoded now" if absent else "complete, no text encoder was loaded"
        yield f"embeddings in {config.data.cache}: {state}"


def idle_warning(config: Config, dp_size: int) -> str:
    """A message about idle processes if the batches of an update cannot be assigned evenly; '' if they can."""
    share = 1 - busy_share(config, dp_size)
    if not share:
        return ""
    batches = Counter(batch.update for batch in assign_batches(config))
    counts = " or ".join(str(count) for count in sorted(set(batches.values())))
    prompts = busy_prompts(config, dp_size)
    more = f", or rollout.prompts_per_step {prompts}" * (prompts > config.rollout.prompts_per_step)
    return (
        f"an update has {counts} batches of {config.rollout.batch_size} samples for {dp_size} processes, which "
        f"are idle {share:.0%} of it; choose a rollout.batch_size that makes the number a multiple of {dp_size}{more}"
    )


def skipped_note(config: Config) -> str:
    """Advice after the first skipped update."""
    return (
        "an update was skipped because its gradient was not finite, so no weight changed; look at "
        f"attention ({config.attention}; _native_math excludes a faulty kernel), dtype ({config.dtype}; fp32 excludes "
        f"overflow) and train.lr ({config.train.lr:g}; too high if it happens late)"
    )


def on_policy_note(config: Config, values: Mapping[str, float], first: bool) -> str:
    """The on-policy check of a finished step: in a run's first step, or when it fails; '' otherwise."""
    error = values.get("policy/on_policy_error")
    limit = config.train.clip_range / 10
    if error is None or not values["samples_trained"] or not (first or error > limit):
        return ""
    found = "exact" if error == 0 else "fine" if error <= limit else f"above clip_range / 10 = {limit:.1e}"
    return f"on-policy check: max |ratio - 1| = {error:.1e} ({found})"

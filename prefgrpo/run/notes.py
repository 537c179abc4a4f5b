"""What a run prints before its first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prefgrpo.config.schema import Config
from prefgrpo.data.prompts import FEWEST_TO_SPLIT
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.world import World
from prefgrpo.rollout.assignment import assign_batches
from prefgrpo.rollout.batches import Rollouts
from prefgrpo.run.evaluate import Evaluator
from prefgrpo.run.memory import memory_line
from prefgrpo.run.policy import Policy


def start_notes(
    config: Config,
    world: World,
    adapter: Adapter,
    policy: Policy,
    rollouts: Rollouts,
    evaluators: Mapping[str, Evaluator],
) -> Iterator[str]:
    """Start-up messages: what is trained, on which prompts, how it is evaluated, and memory before the first step."""
    r = config.rollout
    t = config.train
    e = config.eval
    count = len(rollouts.prompts)
    what = adapter.lora_name(t.lora_from) if t.lora_rank else "full"
    media = f"clips of {frames} frames" if (frames := adapter.frames(r)) else "images"
    size = adapter.parameter_counts()["trainable"] / 1e6
    yield (
        f"{config.family} from {config.model}: training {size:.2f} M parameters ({what}, {config.dtype}) on "
        f"{world.size} × {world.device}; {r.prompts_per_step} prompts × {r.group_size} {media} "
        f"{r.width}×{r.height} per step from {count} prompts"
    )
    held = {name: len(set(evaluator.eval_set.group.tolist())) for name, evaluator in evaluators.items()}
    if not held:
        few = f"{count} prompts are too few for a held-out split (fewer than {FEWEST_TO_SPLIT})"
        why = "eval.every is 0" if not e.every else few if e.holdout else "eval.holdout is 0"
        yield f"no evaluation, so no before/after comparison: {why}, and eval.prompts is empty"
    elif e.prompts or e.final_prompts:
        yield "evaluated on " + ", ".join(f"{number} prompts ({name})" for name, number in held.items())
    else:
        share = f"{held['dev']} of {count + held['dev']} prompts are held out (eval.holdout {e.holdout:g})"
        yield f"{share}: evaluated on every {e.every} steps, never trained on"
    if rollouts.keep_graph:
        yield "the first update of each step reuses the rollout's forwards (train.reuse_rollout_forward)"
    if r.staleness:
        yield (
            "the next step's samples are generated while the current step is judged, before its update "
            "(rollout.staleness), except for the first step and after a checkpoint (every "
            f"{config.checkpoint.every} steps)"
        )
    if waits := idle_warning(config, world.dp_size):
        yield waits
    yield memory_line(adapter, policy)


def idle_warning(config: Config, indices: int) -> str:
    """A message about idle processes if the batches of an update cannot be assigned evenly; '' if they can."""
    r = config.rollout
    batches = Counter(b.update for b in assign_batches(config, [r] * r.prompts_per_step))
    rounds = sum(-(-count // indices) for count in batches.values())
    share = 1 - batches.total() / (rounds * indices)
    if not share:
        return ""
    counts = " or ".join(str(count) for count in sorted(set(batches.values())))
    return (
        f"an update has {counts} batches of up to {r.batch_size} samples for {indices} processes, which are idle "
        f"{share:.0%} of it; choose a rollout.batch_size that makes the number a multiple of {indices}"
    )

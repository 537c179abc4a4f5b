"""`prefgrpo train RECIPE --dry-run`: everything before the first update, on one batch, without writing files.

Reads prompts, loads the model, generates the first batch of step 0 and replays one of its steps with gradients, without
calling judges or rewards. The memory of the step's other samples is allocated, so that the peak is that of a step.
Invariant: it uses the same functions as the run.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from prefgrpo.config.loading import to_dict
from prefgrpo.config.recipe import to_yaml
from prefgrpo.config.schema import Config
from prefgrpo.models.attention import attention_of_a_run
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.gradient_checkpointing import budgets
from prefgrpo.parallel.world import World
from prefgrpo.rollout.render import decode
from prefgrpo.run.errors import errors, refuse
from prefgrpo.run.notes import kernel_notes
from prefgrpo.run.opening import open_run
from prefgrpo.run.rewards import Rewards
from prefgrpo.run.source import open_source
from prefgrpo.update.endpoint import EndpointGradients
from prefgrpo.update.memory import GIB, kept_attention, memory_line, peak_memory, sample_bytes, step_bytes
from prefgrpo.update.trajectory import TrajectoryGradients, replay


@attention_of_a_run()
def dry_run(config: Config) -> int:
    """Print configuration, memory and the first batch; returns the exit code. Raises what `train` raises at start."""
    refuse(errors(config))
    world = parallel.join(config)
    print(to_yaml(to_dict(config), allow_unicode=True))
    source = open_source(config, world, every_set=True)
    Rewards(config, world).check("rewards", config.rewards, source.prompts)
    run = open_run(config, world, source)
    adapter = run.adapter
    gradients = run.gradients
    held = step_bytes(config, gradients, run.policy, world)
    print(memory_line(adapter, run.policy, held, kept_attention(config, adapter, world.layout)))
    for note in [*kernel_notes(config, adapter, world), *source.notes()]:
        print(note)
    evaluated = ", ".join(f"{len(some)} ({name})" for name, some in source.sets.items())
    print(f"{len(source.prompts)} training prompts; evaluation prompts: {evaluated or 'none'}")
    begin = time.perf_counter()
    context = world.layout.context
    share = World(world.rank % context, context, world.device, world.layout, world.mesh)  # generates the same batch
    groups = source.open_groups(adapter, run.embeddings, run.schedules, share)
    plan = groups.plan(0)
    batch = next(groups.batches(plan, lambda group, member, sample: None))
    latents = share.whole(batch.latents, adapter.latent_shape(batch.sampling))
    media = decode(adapter, latents[:1], batch.sampling)
    print(f"first batch: {len(batch.places)} samples, for {plan.prompts[batch.slots[0]].text[:80]!r}")
    own = len(batch.places) * sample_bytes(config, adapter.latent_shape(config.rollout), world.layout)
    others = torch.empty(sum(held.values()) - own, dtype=torch.uint8, device=world.device)
    middle = time.perf_counter()
    if isinstance(gradients, EndpointGradients):
        error = gradients.predict(batch, 0).error
        error.mean().backward()
        checked = f"velocity error {float(error.detach().mean()):.3g}"
    else:
        assert isinstance(gradients, TrajectoryGradients)
        batch = replace(batch, transitions=batch.transitions[:1])
        if config.train.kl_coef:
            with gradients.reference():
                batch = gradients.with_reference(batch)
        stored = gradients.whole(batch.transitions[0])
        new = replay(adapter, batch.schedule, batch.condition, stored, config.rollout, config.train.kl_form)
        new.logp.mean().backward()
        off = float((torch.exp(new.logp.detach() - stored.logp) - 1).abs().max())
        checked = f"max |ratio − 1| = {off:.1e}"
    del others
    samples = [len(batch.places), *media.shape[1:]]
    print(f"samples {samples}, trained steps {list(batch.schedule.trained)}, {checked}")
    seconds = time.perf_counter() - middle
    print(f"encoding, rollout and decoding {middle - begin:.2f} s; one trained step {seconds:.2f} s")
    blocks = [block for net in adapter.modules().values() for block in adapter.blocks(net)]
    kept = max((budget.most for budget in budgets(blocks)), default=0)
    print(f"recomputed blocks kept {kept / GIB:.2f} GiB of attention")
    print(f"peak memory {peak_memory(world.device) / GIB:.2f} GiB; nothing was written")
    return 0

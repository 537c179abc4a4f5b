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
from prefgrpo.parallel.recompute import budgets
from prefgrpo.parallel.world import World
from prefgrpo.rollout.endpoint import EndpointCollector
from prefgrpo.rollout.render import decode
from prefgrpo.rollout.replay import replay
from prefgrpo.run import judging
from prefgrpo.run.errors import errors, refuse
from prefgrpo.run.memory import kept_attention, sample_bytes
from prefgrpo.run.notes import GIB, kernel_notes, memory_line, peak_memory, step_bytes
from prefgrpo.run.opening import open_run
from prefgrpo.run.source import open_source


@attention_of_a_run()
def dry_run(config: Config) -> int:
    """Print configuration, memory and the first batch; returns the exit code. Raises what `train` raises at start."""
    refuse(errors(config))
    world = parallel.join(config)
    print(to_yaml(to_dict(config), allow_unicode=True))
    source = open_source(config, world, every_set=True)
    judging.Rewards(config, world).check("rewards", config.rewards, source.prompts)
    run = open_run(config, world, source)
    adapter = run.adapter
    collector = run.collector
    held = step_bytes(config, collector, run.policy, world)
    print(memory_line(adapter, run.policy, held, kept_attention(config, adapter, world.layout)))
    for note in [*kernel_notes(config, adapter, world), *source.notes()]:
        print(note)
    evaluated = ", ".join(f"{len(some)} ({name})" for name, some in source.sets.items())
    print(f"{len(source.prompts)} training prompts; evaluation prompts: {evaluated or 'none'}")
    begin = time.perf_counter()
    context = world.layout.context
    share = World(world.rank % context, context, world.device, world.layout, world.mesh)  # generates the same batch
    rollouts = source.batches(adapter, run.embeddings, run.schedules, share)
    batch = next(rollouts(0, lambda group, member, sample: None))
    latents = share.whole(batch.latents, adapter.latent_shape(batch.sampling))
    media = decode(adapter, latents[:1], batch.sampling)
    print(f"first batch: {len(batch.places)} samples, for {rollouts.prompts_of(0)[batch.slots[0]].text[:80]!r}")
    own = len(batch.places) * sample_bytes(config, adapter.latent_shape(config.rollout), world.layout)
    others = torch.empty(sum(held.values()) - own, dtype=torch.uint8, device=world.device)
    middle = time.perf_counter()
    if isinstance(collector, EndpointCollector):
        error = collector.predict(batch, 0).error
        error.mean().backward()
        checked = f"velocity error {float(error.detach().mean()):.3g}"
    else:
        batch = replace(batch, steps=batch.steps[:1])
        if config.train.kl_coef:
            with collector.reference():
                batch = collector.with_reference(batch)
        step = collector.whole(batch.steps[0])
        new = replay(adapter, batch.schedule, batch.condition, step, config.rollout, config.train.kl_form)
        new.logp.mean().backward()
        off = float((torch.exp(new.logp.detach() - step.logp) - 1).abs().max())
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

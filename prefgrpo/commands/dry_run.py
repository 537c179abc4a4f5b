"""`prefgrpo train RECIPE --dry-run`: everything before the first update, on one batch, without writing files.

Reads prompts, loads the model, generates the first batch of step 0 and replays one of its steps with gradients, without
calling judges or rewards. Invariant: it uses the same functions as the run.
"""

from __future__ import annotations

import time

import torch

from prefgrpo.config.loading import to_dict
from prefgrpo.config.recipe import to_yaml
from prefgrpo.config.schema import Config
from prefgrpo.data.prompts import prompt_sets
from prefgrpo.objectives import objective
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.batches import Rollouts
from prefgrpo.rollout.embeddings import Embeddings, encoding_jobs, uncached
from prefgrpo.rollout.endpoint import EndpointCollector
from prefgrpo.rollout.replay import replay
from prefgrpo.run.memory import GIB, memory_line
from prefgrpo.run.session import open_collector, open_model, open_schedules, peak_memory


def dry_run(config: Config) -> int:
    """Print configuration, memory and the first batch; returns the exit code. Raises what `train` raises at start."""
    world = parallel.join(config.device, config)
    print(to_yaml(to_dict(config), allow_unicode=True))
    prompts, sets = prompt_sets(config)
    absent = uncached(config, encoding_jobs(config, prompts))
    goal = objective(config.train)
    adapter, policy = open_model(config, goal, world, prompts, encoders=bool(absent))
    schedules = open_schedules(config, adapter, world, prompts)
    print(memory_line(adapter, policy))
    evaluated = ", ".join(f"{len(held)} ({name})" for name, held in sets.items())
    print(f"{len(prompts)} training prompts; evaluation prompts: {evaluated or 'none'}")
    embeddings = Embeddings(adapter, config.data.max_length, None if absent else config.data.cache or None)
    begin = time.perf_counter()
    samples = list[Sample]()
    alone = World(0, 1, world.device)
    rollouts = Rollouts(config, adapter, embeddings, schedules, prompts, alone)
    batch = next(rollouts(0, lambda group, member, sample: samples.append(sample)))
    print(f"first batch: {len(samples)} samples, the first for {samples[0].prompt[:80]!r}")
    r = batch.sizes
    steps = batch.trajectory.steps
    middle = time.perf_counter()
    collector = open_collector(config, goal, adapter, policy, world)
    if isinstance(collector, EndpointCollector):
        error = collector.predict(batch, 0).error
        error.mean().backward()
        checked = f"velocity error {float(error.detach().mean()):.3g}"
    else:
        kl = config.train.kl_form if config.train.kl_coef else ""
        new = replay(adapter, batch.schedule, batch.condition, steps[0], r, kl, collector.reference)
        new.logp.mean().backward()
        off = float((torch.exp(new.logp.detach() - steps[0].logp) - 1).abs().max())
        checked = f"max |ratio − 1| = {off:.1e}"
    shape = [len(samples), *samples[0].media.pixels.shape]
    print(f"samples {shape}, trained steps {list(batch.schedule.trained)}, {checked}")
    seconds = time.perf_counter() - middle
    print(f"encoding, rollout and decoding {middle - begin:.2f} s; one trained step {seconds:.2f} s")
    print(f"peak memory {peak_memory(world.device) / GIB:.2f} GiB; nothing was written")
    return 0

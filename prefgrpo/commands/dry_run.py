"""`prefgrpo train RECIPE --dry-run`: everything before the first update, on one batch; nothing is written.

Reads prompts, loads the model, renders the first batch of step 0, replays one of its steps with gradient. Judges and
rewards are not asked. Invariant: what it does is what the run will do, by the same functions.
"""

from __future__ import annotations

import time

import torch
import yaml

from prefgrpo.config.schema import Config, to_dict
from prefgrpo.data.prompts import prompt_sets, step_prompts
from prefgrpo.parallel import world as parallel
from prefgrpo.rollout.embed import Embeddings
from prefgrpo.rollout.render import conditions, decode
from prefgrpo.rollout.replay import replay
from prefgrpo.rollout.rollout import rollout
from prefgrpo.rollout.sampling import of_prompt
from prefgrpo.run.loading import missing, uses
from prefgrpo.run.memory import GIB, known_bytes
from prefgrpo.run.session import check_run, open_schedules, peak_memory, trainable_adapter


def dry_run(config: Config) -> int:
    """Print configuration, plan and the first batch; returns the exit code. Raises what `train` raises at start."""
    world = parallel.start(config.device)
    try:
        check_run(config, world.size)
        print(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True))
        r, (prompts, sets) = config.rollout, prompt_sets(config)
        absent = missing(config, uses(config, prompts))
        adapter = trainable_adapter(config, world.device, bool(absent))
        schedules = open_schedules(config, adapter, world, prompts)
        for name, value in known_bytes(config, adapter, world.size).items():
            print(f"{name:<10} {value / GIB:10.4g} GiB per process")
        chosen = step_prompts(len(prompts), r.prompts_per_step, config.seed, 0)
        sized = [(prompts[i], of_prompt(prompts[i], r, config.data.own_sizes)) for i in chosen]
        r = sized[0][1]
        batch = [p for p, sizes in sized if sizes == r for _ in range(r.group_size)][: r.batch_size]
        schedule = schedules.step(r, 0)
        told = ", ".join(f"{len(held)} of the set {name}" for name, held in sets.items())
        print(f"{len(prompts)} training prompts; to evaluate on: {told or 'none'}")
        print(f"first batch: {len(batch)} samples of {batch[0].text[:80]!r} …")
        embeddings = Embeddings(adapter, config.data.max_length, None if absent else config.data.cache or None)
        condition = conditions(embeddings, batch, r, world.device)
        ids = torch.arange(len(batch), device=world.device)
        begin = time.perf_counter()
        done = rollout(adapter, schedule, condition, ids, seed=config.seed, height=r.height, width=r.width)
        media = decode(adapter, done.latents, r, config.memory.decode_batch)
        middle = time.perf_counter()
        kl = config.train.kl_form if config.train.kl_coef else ""
        new = replay(adapter, schedule, condition, done.steps[0], height=r.height, width=r.width, kl=kl)
        new.logp.mean().backward()
        error = float((torch.exp(new.logp.detach() - done.steps[0].logp) - 1).abs().max())
        print(f"samples {list(media.shape)}, trained steps {list(schedule.sde_steps)}, max |ratio − 1| = {error:.1e}")
        print(f"rollout and decode {middle - begin:.2f} s, one trained step {time.perf_counter() - middle:.2f} s")
        print(f"peak memory {peak_memory(world.device) / GIB:.2f} GiB; nothing was written")
    finally:
        parallel.stop()
    return 0

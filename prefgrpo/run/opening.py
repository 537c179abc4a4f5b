"""Opens the parts of a run that depend on the model: the policy, its schedules, and what collects its gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter
from prefgrpo.objectives.base import EndpointObjective, Objective, TrajectoryObjective
from prefgrpo.parallel.parallelize import parallelize
from prefgrpo.parallel.world import World
from prefgrpo.rollout.endpoint import EndpointCollector
from prefgrpo.rollout.replay import TrajectoryCollector
from prefgrpo.rollout.sampling import Schedules, all_sizes, eval_sampling
from prefgrpo.run.checks import check_context
from prefgrpo.run.loading import config_errors_as, open_adapter
from prefgrpo.run.policy import Policy

Collector = TrajectoryCollector | EndpointCollector
"""Turns a batch and its targets into gradients."""


def open_model(
    config: Config, goal: Objective, world: World, prompts: list[Prompt], encoders: bool
) -> tuple[Adapter, Policy]:
    """(the model ready to train, its policy), after checking that sizes can be split. Raises ConfigError."""
    adapter = open_adapter(config, world.device, encoders, world.layout.fsdp)
    check_context(config, world, adapter, prompts)
    parallelize(adapter, config, world)
    return adapter, open_policy(config, goal, adapter)


def open_policy(config: Config, goal: Objective, adapter: Adapter) -> Policy:
    """The trained weights, with the copies that the objective needs: of an old policy, and without a LoRA of the
    initial weights."""
    t = config.train
    old = goal.anchor == "old" or goal.sampled_by_old
    base = t.swaps_reference and (goal.anchor == "base" or t.kl_coef > 0)
    return Policy(dict(adapter.trainable()), t, old, base)


def open_schedules(config: Config, adapter: Adapter, world: World, prompts: list[Prompt]) -> Schedules:
    """The schedules of a run, after checking every size of its prompts. Raises ConfigError."""
    schedules = Schedules(config, adapter, world.device)
    with config_errors_as("rollout, or a prompt's own size"):
        for sizes in all_sizes(prompts, config.rollout, config.data.own_sizes):
            adapter.latent_shape(sizes)
            schedules.check(sizes)
    shown = eval_sampling(config)
    with config_errors_as("eval.height/width/frames"):
        adapter.latent_shape(shown)
    return schedules


def open_collector(config: Config, goal: Objective, adapter: Adapter, policy: Policy, world: World) -> Collector:
    """The collector of the objective. Raises ConfigError for a `times` that a family with several denoisers rejects."""

    def reference() -> AbstractContextManager[None]:
        return policy.use_weights(policy.base) if config.train.swaps_reference else adapter.reference()

    if isinstance(goal, TrajectoryObjective):
        return TrajectoryCollector(adapter, goal, config.train, reference)
    assert isinstance(goal, EndpointObjective)
    if len(adapter.denoisers) > 1 and goal.times not in ("window", "schedule"):
        which = f"{config.family} has a denoiser for each part of the schedule: expected window or schedule"
        raise ConfigError([f"train.objective_options.times: {which}, got {goal.times}"])
    anchor = reference if goal.anchor == "base" else lambda: policy.use_weights(policy.old)
    return EndpointCollector(adapter, goal, config, anchor, reference)

"""A diffusers scheduler whose steps follow a rule of prefgrpo.sde.rules and return their log-prob.

    scheduler = SDEFlowMatchScheduler.from_config(pipe.scheduler.config, rule="flow", eta=0.7)

In everything else (timesteps, shifts, saving, loading, pipelines) it is a `FlowMatchEulerDiscreteScheduler`. Invariant:
a deterministic step (η = 0, or outside `sde_steps`) is bitwise that class's own step and draws no noise; log-probs are
computed from x' as stored.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from prefgrpo.integrations.steps import index_of
from prefgrpo.ops import PhiloxNoise, sde_logp, sde_step
from prefgrpo.sde.schedule import Schedule, make_schedule

# A saved pipeline refers to this module, in which diffusers looks for SchedulerMixin to know how to load the class.
__all__ = ["SDEFlowMatchScheduler", "SDEFlowMatchSchedulerOutput", "SchedulerMixin"]


@dataclass
class SDEFlowMatchSchedulerOutput(BaseOutput):
    """Result of `SDEFlowMatchScheduler.step`."""

    prev_sample: Tensor
    """[B, …] x' in the model output's dtype."""
    logp: Tensor
    """[B] fp32; 0 for a deterministic step."""


class SDEFlowMatchScheduler(FlowMatchEulerDiscreteScheduler):
    """FlowMatchEulerDiscreteScheduler with stochastic steps.

    rule: a key of prefgrpo.sde.rules.RULES. eta: η of the rule. sde_steps: indices of the stochastic steps (None: all).
    The other arguments are diffusers'. Raises ValueError for an unknown rule and, in `set_timesteps`, for η or steps
    out of range.
    """

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        shift: float = 1.0,
        use_dynamic_shifting: bool = False,
        base_shift: float | None = 0.5,
        max_shift: float | None = 1.15,
        base_image_seq_len: int = 256,
        max_image_seq_len: int = 4096,
        invert_sigmas: bool = False,
        shift_terminal: float | None = None,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        time_shift_type: str = "exponential",
        stochastic_sampling: bool = False,
        rule: str = "flow",
        eta: float = 0.7,
        sde_steps: list[int] | None = None,
    ) -> None:
        # by keyword: diffusers treats positional arguments as not given
        theirs = inspect.signature(FlowMatchEulerDiscreteScheduler).parameters
        super().__init__(**{name: self.config[name] for name in theirs if name in self.config})
        make_schedule(torch.tensor([1.0, 0.5, 0.0]), rule, 0.0)  # raises for an unknown rule
        self.schedule: Schedule | None = None

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """diffusers' `set_timesteps`; also computes the coefficient table of the new schedule."""
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)
        steps = None if self.config.sde_steps is None else tuple(self.config.sde_steps)
        with torch.inference_mode(False):
            schedule = make_schedule(self.sigmas, self.config.rule, self.config.eta, steps)
            self.schedule = schedule.to(self.sigmas.device)

    @torch.no_grad()
    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        *,
        generator: Any = None,
        noise: Tensor | PhiloxNoise | None = None,
        return_dict: bool = True,
    ) -> SDEFlowMatchSchedulerOutput | tuple[Tensor, Tensor]:
        """x' and its log-prob for model_output and sample [B, …] at one timestep; advances to the next step.

        noise: ε like sample, or a PhiloxNoise (whose step is then the index of this step); by default drawn in fp32
        with `generator` (as in diffusers; a list has one per sample). Raises ValueError if both are given.
        """
        if noise is not None and generator is not None:
            raise ValueError("expected a generator or a noise, got both")
        schedule = self._schedule_on(sample.device)
        if self.step_index is None:
            self._init_step_index(timestep)
        k = self.step_index
        if k not in schedule.sde_steps:
            x_next = super().step(model_output, timestep, sample, generator=generator, return_dict=False)[0]
            logp = torch.zeros(sample.shape[0], device=sample.device)
        else:
            if noise is None:
                noise = randn_tensor(sample.shape, generator, sample.device, torch.float32)
            x_next, logp, *_ = sde_step(
                sample, model_output, schedule.coef, k, noise=noise, out_dtype=model_output.dtype
            )
            self._step_index += 1
        return SDEFlowMatchSchedulerOutput(x_next, logp) if return_dict else (x_next, logp)

    def logp(self, model_output: Tensor, timestep: Any, sample: Tensor, prev_sample: Tensor) -> Tensor:
        """Replay of `step`: log-prob [B] of stored steps sample → prev_sample, differentiable in model_output.

        timestep: 1 or B timesteps of this schedule, in any order. Raises RuntimeError for one that is not in it.
        """
        schedule = self._schedule_on(sample.device)
        index = index_of(self.timesteps, timestep, sample.device).expand(sample.shape[0])
        return sde_logp(sample, model_output, prev_sample, schedule.coef, index).logp

    def _schedule_on(self, device: torch.device) -> Schedule:
        """The schedule on the samples' device, moved there once."""
        if self.schedule is None:
            raise RuntimeError("the scheduler has no schedule yet: call set_timesteps before step or logp")
        if self.schedule.coef.device != device:
            self.schedule = self.schedule.to(device)
        return self.schedule

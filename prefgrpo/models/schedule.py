"""The stock pipeline's own scheduler: its sigmas, timesteps and time shift for a size and a number of steps."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from prefgrpo.config.schema import SamplingConfig as Sampling
from prefgrpo.models.sizes import Sizes


class StockSchedule(Sizes):
    """The part of an `Adapter` that reads the pipeline's scheduler."""

    pipeline: ClassVar[str]
    """Name of the stock diffusers pipeline class."""

    leaves_sigmas: ClassVar[bool] = False
    """Whether the stock pipeline passes no sigmas to a scheduler that has `use_flow_sigmas`."""

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """Arguments that the stock pipeline passes to `set_timesteps`, besides the number of steps and the device.

        mu only matters if the scheduler shifts dynamically.
        """
        mu = {"mu": self.mu(sampling)}
        if self.leaves_sigmas and self.pipe.scheduler.config.get("use_flow_sigmas"):
            return mu
        return {"sigmas": np.linspace(1.0, 1.0 / sampling.steps, sampling.steps)} | mu

    def mu(self, sampling: Sampling) -> float:
        """The dynamic time shift: linear in the number of tokens, with the scheduler config's parameters."""
        get = self.pipe.scheduler.config.get
        low = get("base_image_seq_len", 256)
        high = get("max_image_seq_len", 4096)
        base = get("base_shift", 0.5)
        slope = (get("max_shift", 1.15) - base) / (high - low)
        return self.tokens(sampling) * slope + (base - slope * low)

    def stock_scheduler(self) -> Any:
        """A fresh, deterministic copy of the pipeline's scheduler. ValueError if it is no flow-matching scheduler."""
        scheduler = self.pipe.scheduler
        if "shift" not in scheduler.config and not scheduler.config.get("use_flow_sigmas"):
            raise ValueError(
                f"{type(scheduler).__name__} is not a flow-matching scheduler: expected "
                "FlowMatchEulerDiscreteScheduler, or a solver with use_flow_sigmas"
            )
        still = {"stochastic_sampling": False} if "stochastic_sampling" in scheduler.config else {}
        return type(scheduler).from_config(scheduler.config, **still)

    def timed_scheduler(self, sampling: Sampling) -> Any:
        """`stock_scheduler` after `set_timesteps`, called as the stock pipeline does for this size."""
        scheduler = self.stock_scheduler()
        options = self.schedule_options(sampling)
        try:
            scheduler.set_timesteps(num_inference_steps=sampling.steps, device="cpu", **options)
        except (TypeError, AssertionError) as error:
            raise ValueError(
                f"{type(scheduler).__name__} does not take what {self.pipeline} passes it ({', '.join(options)}): "
                "expected FlowMatchEulerDiscreteScheduler"
            ) from error
        return scheduler

    def sigmas(self, sampling: Sampling) -> Tensor:
        """[steps + 1] fp32 sigmas of the stock pipeline's own scheduler for this size.

        Heun's scheduler repeats each, and here they are merged. For other schedulers duplicates stay, so that
        `make_schedule` rejects them: merging would silently sample with fewer steps than requested.
        """
        scheduler = self.timed_scheduler(sampling)
        sigmas = scheduler.sigmas.to(torch.float32)
        return sigmas.unique_consecutive() if scheduler.order > 1 else sigmas

    def times(self, sampling: Sampling) -> Tensor:
        """[steps] fp32, the stock pipeline's timesteps / 1000: σ, or whole thousandths if the solver rounds them."""
        timesteps = self.timed_scheduler(sampling).timesteps
        return self.sigmas(sampling)[:-1] if timesteps.is_floating_point() else timesteps.float() / 1000

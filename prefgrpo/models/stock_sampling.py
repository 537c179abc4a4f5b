"""Sizes of a family's samples, and the stock pipeline's own scheduler: its sigmas and timesteps for a size."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from prefgrpo.config.schema import SamplingConfig as Sampling


class StockSampling:
    """The part of an `Adapter` that counts tokens and reads the pipeline's scheduler."""

    pipe: Any
    """The stock diffusers pipeline."""
    pipeline: ClassVar[str]
    """Name of the stock diffusers pipeline class."""
    default_frames: ClassVar[int | None] = None
    """Frames per clip of the published model; None: it makes images."""
    stock_sampler: ClassVar[str] = ""
    """What the stock call does by default besides guidance, and evaluation therefore too; "": nothing (see the table in
    docs/evaluation.md)."""
    frame_rate: ClassVar[float | None] = None
    """Frames per second of the published model's clips."""

    def frames(self, sampling: Sampling) -> int | None:
        """Frames per clip; None for images."""
        return self.default_frames if sampling.frames is None else sampling.frames

    @property
    def unit(self) -> int:
        """Side of one token in pixels; image sides are multiples of it."""
        return 2 * self.pipe.vae_scale_factor

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of rows or columns of tokens for which the denoiser has positions; None: no limit."""
        return None

    def grid(self, sampling: Sampling) -> tuple[int, int]:
        """Rows and columns of tokens; ValueError for sides that are not multiples of `unit`, or too long."""
        height = sampling.height
        width = sampling.width
        unit = self.unit
        if height % unit or width % unit:
            near = " × ".join(str(max(1, round(side / unit)) * unit) for side in (height, width))
            expected = f"multiples of {unit} for this model, the nearest are {near}"
            raise ValueError(f"height and width: expected {expected}, got {height} × {width}")
        if self.most_tokens is not None and max(height, width) > self.most_tokens * unit:
            most = f"at most {self.most_tokens * unit} pixels a side, for which this model has positions"
            raise ValueError(f"height and width: expected {most}, got {height} × {width}")
        return height // unit, width // unit

    def tokens(self, sampling: Sampling) -> int:
        """Number of tokens of a sample's latents, which context parallelism splits."""
        return math.prod(self.grid(sampling))

    def attention_tokens(self, sampling: Sampling, max_length: int) -> list[tuple[int, int]]:
        """(queries, keys) of the blocks' attention for a prompt of max_length tokens, without source images. Here for
        blocks in which text and latent tokens attend to each other."""
        both = self.tokens(sampling) + max_length
        return [(both, both)]

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """Arguments that the stock pipeline passes to `set_timesteps`, besides the number of steps and the device.

        mu only matters if the scheduler shifts dynamically.
        """
        return {"sigmas": np.linspace(1.0, 1.0 / sampling.steps, sampling.steps), "mu": self.mu(sampling)}

    def mu(self, sampling: Sampling) -> float:
        """The dynamic time shift: linear in the number of tokens, with the scheduler config's parameters."""
        get = self.pipe.scheduler.config.get
        low, high = get("base_image_seq_len", 256), get("max_image_seq_len", 4096)
        base = get("base_shift", 0.5)
        slope = (get("max_shift", 1.15) - base) / (high - low)
        return self.tokens(sampling) * slope + (base - slope * low)

    def timed_scheduler(self, sampling: Sampling) -> Any:
        """A copy of the pipeline's scheduler after `set_timesteps`, called as the stock pipeline does for this size.

        Raises ValueError if it does not give `steps + 1` sigmas that fall within [0, 1].
        """
        kind = type(self.pipe.scheduler)
        config = dict(self.pipe.scheduler.config)
        if "shift" not in config and not config.get("use_flow_sigmas"):
            raise ValueError(
                f"{kind.__name__} is not a flow-matching scheduler: expected FlowMatchEulerDiscreteScheduler, or "
                "use_flow_sigmas"
            )
        options = self.schedule_options(sampling)
        scheduler, problem = _timed(kind, config, sampling.steps, options)
        if scheduler and sampling.steps == 1 and scheduler.sigmas.isnan().any():  # it stretches to a last sigma
            raise ValueError("expected 2 or more, as this model's scheduler gives NaN, got 1")
        if problem:
            raise ValueError(f"{problem}. {_advice(kind, config, sampling.steps, options)}")
        return scheduler

    def sigmas(self, sampling: Sampling) -> Tensor:
        """[steps + 1] fp32 sigmas of the stock pipeline's own scheduler for this size; ValueError if it has none."""
        return self.timed_scheduler(sampling).sigmas.to(torch.float32).clamp(max=1.0)  # a shift may round 1 up

    def times(self, sampling: Sampling) -> Tensor:
        """[steps] fp32, the stock pipeline's timesteps / 1000: σ, or whole thousandths if the solver rounds them."""
        timesteps = self.timed_scheduler(sampling).timesteps
        return self.sigmas(sampling)[:-1] if timesteps.is_floating_point() else timesteps.float() / 1000


def _timed(kind: type, config: dict[str, Any], steps: int, options: dict[str, Any]) -> tuple[Any, str]:
    """(scheduler of this class and configuration, its timesteps set; what is wrong with its sigmas, "" if nothing)."""
    expected = f"expected {steps + 1} sigmas that fall within [0, 1]"
    try:
        scheduler = kind.from_config(config)  # type: ignore[attr-defined]
        scheduler.set_timesteps(num_inference_steps=steps, device="cpu", **options)
        sigmas = scheduler.sigmas.to(torch.float32)
    except Exception as error:  # noqa: BLE001  (schedulers of diffusers refuse in many ways)
        return None, f"{expected}, and {kind.__name__} raises {type(error).__name__}: {error}"
    falling = bool((sigmas.diff() < 0).all()) and 0 <= float(sigmas[-1]) <= float(sigmas[0]) <= 1 + 1e-6
    if len(sigmas) == steps + 1 and falling:
        return scheduler, ""
    shown = ", ".join(f"{float(sigma):.3g}" for sigma in sigmas[:3])
    return scheduler, f"{expected}, and {kind.__name__} gives {len(sigmas)}: {shown} … {float(sigmas[-1]):.3g}"


def _advice(kind: type, config: dict[str, Any], steps: int, options: dict[str, Any]) -> str:
    """What to change: the keys of the configuration that alone make this class's sigmas unusable, or the class."""
    plain = {"use_flow_sigmas": True} if config.get("use_flow_sigmas") else {}
    instead = "or set rollout.shift, which needs no scheduler"
    if _timed(kind, plain, steps, options)[1]:
        return f"Use another scheduler in this model's folder, such as FlowMatchEulerDiscreteScheduler, {instead}"
    values = {key: value for key, value in config.items() if not key.startswith("_")}
    wrong = [
        f"{key}: {value!r}" for key, value in values.items() if _timed(kind, plain | {key: value}, steps, options)[1]
    ]
    return f"Remove {', '.join(wrong) or 'what differs from the defaults'} from its scheduler_config.json, {instead}"

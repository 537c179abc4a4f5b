"""The training loop shared by the tiny VAE, base and judge.

AdamW with warm-up and linear decay, gradient clipping, an optional exponential moving average of
the weights, a tqdm bar and one readable line every `log_every` steps. Counts steps, never seconds,
so the same seed, step count and thread count repeat the same run.
Invariant: with `ema` set, the parameters hold the average when `fit` returns.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

StepLoss = Callable[[int], tuple[Tensor, dict[str, float]]]


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    steps: int
    lr: float
    warmup: int = 50
    final: float = 0.02  # last learning rate / peak
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    ema: float = 0.0  # decay of the averaged weights; 0 = none

    def scale(self, step: int) -> float:
        """Learning-rate factor at `step`: linear warm-up, then linear decay to `final`."""
        done = step / max(1, self.steps)
        return min(1.0, (step + 1) / self.warmup) * max(self.final, 1 - (1 - self.final) * done)


def parameter_count(module: nn.Module) -> int:
    """Number of parameters in a module."""
    return sum(p.numel() for p in module.parameters())


def fit(
    name: str,
    groups: Sequence[tuple[Sequence[nn.Parameter], float]],
    step_loss: StepLoss,
    schedule: Schedule,
    log_every: int = 200,
    on_log: Callable[[int], str] | None = None,
) -> float:
    """Minimise `step_loss(step)` over `groups` = (parameters, lr factor); returns CPU seconds.

    `step_loss` returns the loss and the numbers to print, which are averaged over the steps of a line.
    """
    optimizer = torch.optim.AdamW(
        [{"params": list(params), "factor": factor} for params, factor in groups],
        lr=schedule.lr, betas=schedule.betas, weight_decay=schedule.weight_decay,
    )  # fmt: skip
    params = [p for group in optimizer.param_groups for p in group["params"]]
    ema = [p.detach().clone() for p in params] if schedule.ema else []
    sums: dict[str, float] = {}
    started = time.time()
    cpu_started = time.process_time()
    bar = tqdm(range(schedule.steps), desc=name, mininterval=5.0, dynamic_ncols=True)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr * group["factor"] * schedule.scale(step)
        loss, numbers = step_loss(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        if ema:
            decay = min(schedule.ema, (1 + step) / (10 + step))
            torch._foreach_lerp_(ema, [p.detach() for p in params], 1 - decay)
        for key, value in {"loss": loss.item(), **numbers}.items():
            sums[key] = sums.get(key, 0.0) + value
        if (step + 1) % log_every == 0:
            shown = "  ".join(f"{key} {value / log_every:.4f}" for key, value in sums.items())
            extra = "  " + on_log(step) if on_log else ""
            bar.write(f"{name} step {step + 1}  {time.time() - started:.0f} s  {shown}{extra}")
            sums.clear()
    with torch.no_grad():
        for param, mean in zip(params, ema, strict=False):
            param.copy_(mean)
    return time.process_time() - cpu_started

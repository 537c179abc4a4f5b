"""The trained weights with their optimiser, their EMA, and the weight copies that objectives compare with.

AdamW on fp32 master weights; the EMA is one fused lerp per update, the old policy one per training step. Sharded
weights (FSDP2) are DTensors whose gradients are already summed; torch's fused ops take tensors or DTensors, not both.
Invariant: `state_dict` holds everything that the next update depends on, so a resumed run continues bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from prefgrpo.config.schema import TrainConfig
from prefgrpo.parallel.shard import full_tensor, is_sharded, to_local
from prefgrpo.parallel.world import World

FUSED_ON = ("cuda",)
"""Device types on which AdamW uses its fused kernel."""


def learning_rate(train: TrainConfig, position: int) -> float:
    """Learning rate of the update at a position in the run, step · updates_per_rollout + its number in the step, both
    from 0: linear warm-up, then constant, or decaying to 0 at the end of the run, with wsd in its second half.

    Updates that are not made, because there was nothing to learn or a gradient was not finite, do not delay it.
    """
    if position < train.warmup_steps:
        return train.lr * ((position + 1) / train.warmup_steps)
    end = train.steps * train.updates_per_rollout
    begin: float = train.warmup_steps
    if train.lr_scheduler == "wsd":
        begin = max(begin, end / 2)
    if train.lr_scheduler == "constant" or position < begin:
        return train.lr
    left = max(end - position, 0) / max(end - begin, 1)
    if train.lr_scheduler == "cosine":
        left = 0.5 - 0.5 * math.cos(math.pi * left)
    return train.lr * left


SKIPS = 3
"""Updates in a row with a non-finite gradient that end a run."""


class NonFiniteGradient(RuntimeError):
    """The gradient norm was NaN or infinite in SKIPS updates in a row, which changed no weight."""


class Policy:
    """Trainable parameters, AdamW, EMA and weight copies."""

    def __init__(
        self, parameters: dict[str, Tensor], train: TrainConfig, old: bool = False, reference: bool = False
    ) -> None:
        """old: keep an old policy's weights. reference: keep the initial weights as those of the
        reference policy (not needed with a new LoRA, which is left out instead)."""
        self.train = train
        self.parameters = parameters
        self.params = list(parameters.values())
        replicated = [p for p in self.params if not is_sharded(p)]
        sharded = [p for p in self.params if is_sharded(p)]
        self.kinds = [kind for kind in (replicated, sharded) if kind]
        """The non-empty ones of the lists of replicated and of sharded parameters."""
        self.optimizer = torch.optim.AdamW(
            [{"params": kind, "fused": _fused(kind)} for kind in self.kinds],
            lr=train.lr,
            betas=(0.9, train.beta2),
            weight_decay=train.weight_decay,
        )
        for p in self.params:  # as AdamW does in its first step; a checkpoint is read into these
            self.optimizer.state[p] = {
                "step": torch.zeros((), device=p.device if _fused([p]) else "cpu"),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        self.ema = self._copy() if train.ema_decay else {}
        self.old = self._copy() if old else {}
        self.reference = self._copy() if reference else {}
        self.updates = 0
        self.skipped = 0
        """Skipped updates since the last one."""

    def update(self, world: World, position: int) -> float | None:
        """Sum gradients over ranks, clip, step with the `learning_rate` of this position in the run. Returns the
        gradient norm before clipping.

        If that is not finite, all ranks skip the update and get None; SKIPS in a row raise NonFiniteGradient.
        """
        world.sum_gradients(self.params)
        norms = [full_tensor(get_total_norm([p.grad for p in kind if p.grad is not None])) for kind in self.kinds]
        norms = [norm.to(norms[0].device) for norm in norms]  # with offload: [weights], shards are on the CPU
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        for kind in self.kinds:
            clip_grads_with_norm_(kind, self.train.max_grad_norm, total)
        norm = float(total)
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad()
            self.skipped += 1
            if self.skipped >= SKIPS:
                raise NonFiniteGradient(f"gradient norm is {norm}, in {SKIPS} updates in a row")
            return None
        self.skipped = 0
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train, position)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.ema and self.updates % self.train.ema_every == 0:
            with torch.no_grad():
                torch._foreach_lerp_(to_local(self.ema.values()), to_local(self.params), 1.0 - self.train.ema_decay)
        return norm

    def _copy(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.parameters.items()}

    def update_old(self, decay: float) -> None:
        """old ← decay · old + (1 − decay) · parameters (no-op without an old policy)."""
        if self.old:
            with torch.no_grad():
                torch._foreach_lerp_(to_local(self.old.values()), to_local(self.params), 1.0 - decay)

    def use_ema(self) -> AbstractContextManager[None]:
        """Context in which the parameters hold their EMA (no-op without EMA)."""
        return self.use_weights(self.ema)

    @contextmanager
    def use_weights(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Context in which the parameters hold `weights`: `ema`, `old` or `reference` (no-op if empty)."""
        if not weights:
            yield
            return
        live = to_local(self.params)
        saved = [p.detach().clone() for p in live]
        with torch.no_grad():
            torch._foreach_copy_(live, to_local(weights.values()))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, saved)

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint, by name: the live ones, which a checkpoint is also read into."""
        kinds = {"param": self.parameters, "ema": self.ema, "old": self.old}
        out = {f"{kind}.{n}": t.detach() for kind, tensors in kinds.items() for n, t in tensors.items()}
        for name, p in self.parameters.items():
            out |= {f"adamw.{key}.{name}": value for key, value in self.optimizer.state[p].items()}
        return out


def _fused(kind: list[Tensor]) -> bool | None:
    """Whether AdamW updates these parameters with its fused kernel, which needs no temporary copies of them; on CPUs
    None, torch's default."""
    return all(p.device.type in FUSED_ON for p in kind) or None

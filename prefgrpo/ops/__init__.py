"""The public fused ops: used by the trainer and importable from other codebases.

One file per op: the equation, the reference in torch, the custom op, its gradient and the public function. Invariant:
on every backend, every input gives the same result as the reference.
"""

from prefgrpo.ops._backend import backend_of, use_backend
from prefgrpo.ops.advantage import group_advantage, winrate_advantage
from prefgrpo.ops.gated_residual import gated_residual
from prefgrpo.ops.layernorm_modulate import layernorm_modulate
from prefgrpo.ops.noise import PhiloxNoise, philox_normal
from prefgrpo.ops.policy_loss import METRICS, PolicyLoss, metrics_by_name, policy_loss
from prefgrpo.ops.qk_norm_rope import qk_norm_rope
from prefgrpo.ops.sde_step import SdeLogp, SdeStep, sde_logp, sde_step

__all__ = [
    "METRICS",
    "PhiloxNoise",
    "PolicyLoss",
    "SdeLogp",
    "SdeStep",
    "backend_of",
    "gated_residual",
    "group_advantage",
    "layernorm_modulate",
    "metrics_by_name",
    "philox_normal",
    "policy_loss",
    "qk_norm_rope",
    "sde_logp",
    "sde_step",
    "use_backend",
    "winrate_advantage",
]

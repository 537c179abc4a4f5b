"""The public fused ops: used by the trainer and importable from other codebases.

Invariant: on every backend, every input gives the same result as `ops.reference` (plain torch).
"""

from prefgrpo.ops.advantage import group_advantage, winrate_advantage
from prefgrpo.ops.affine import AffineLogp, AffineStep, affine_logp, affine_step, philox_normal
from prefgrpo.ops.args import Guidance, NoiseAddress
from prefgrpo.ops.backend import backend_of, use_backend
from prefgrpo.ops.policy import METRICS, PolicyLoss, metrics_by_name, policy_loss
from prefgrpo.ops.shaping import bradley_terry

__all__ = [
    "METRICS",
    "AffineLogp",
    "AffineStep",
    "Guidance",
    "NoiseAddress",
    "PolicyLoss",
    "affine_logp",
    "affine_step",
    "backend_of",
    "bradley_terry",
    "group_advantage",
    "metrics_by_name",
    "philox_normal",
    "policy_loss",
    "use_backend",
    "winrate_advantage",
]

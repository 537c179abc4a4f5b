"""The public fused ops: what the trainer uses and what other codebases import.

Invariant: for every input the result is that of `ops.reference` (plain torch) on every backend.
"""

from prefgrpo.ops.advantage import group_advantage, winrate_advantage
from prefgrpo.ops.affine import AffineLogp, AffineStep, NoiseAddress, affine_logp, affine_step, philox_normal
from prefgrpo.ops.policy import METRICS, PolicyLoss, policy_loss

__all__ = [
    "METRICS",
    "AffineLogp",
    "AffineStep",
    "NoiseAddress",
    "PolicyLoss",
    "affine_logp",
    "affine_step",
    "group_advantage",
    "philox_normal",
    "policy_loss",
    "winrate_advantage",
]

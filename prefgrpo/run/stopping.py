"""What ends a run before its last step, and can be resumed from."""

from __future__ import annotations

from prefgrpo.run.advantage import CombineError
from prefgrpo.run.metrics import NoInformation, RewardsMissing
from prefgrpo.run.policy import NonFiniteGradient


class TrainingStopped(RuntimeError):
    """The run stopped but can be resumed; the message says from where, and what to fix."""


class Diverged(RuntimeError):
    """The policy generates non-finite latents."""


ENDS_A_RUN = (NonFiniteGradient, RewardsMissing, NoInformation, Diverged, CombineError)
"""Errors of a step after which training on would be of no use."""

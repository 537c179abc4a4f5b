"""DanceGRPO's `flux_step`, which is Pref-GRPO's `dance_grpo_step` (whose last argument DanceGRPO does not have).

Invariant: same arguments, return order and random stream as XueZeyue/DanceGRPO (torch's own stream, no generator).
"""

from prefgrpo.integrations.pref_grpo import dance_grpo_step as flux_step

__all__ = ["flux_step"]

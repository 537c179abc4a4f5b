"""Drop-in step functions for other GRPO codebases, based on the fused ops.

Each module here has a codebase's functions under their own names, to import in one line; `patch("flow_grpo")` replaces
those of an imported codebase, and `unpatch` restores them.
`lora.fuse_lora` makes peft's LoRA layers faster, `rotary.fuse_rotary` diffusers' rotary embedding, and
`diffusers.SDEFlowMatchScheduler` is a scheduler for any pipeline.
Intended differences: docs/integrations.md.
Invariant: in fp32 the results are the peer's within rounding, and the same torch generator gives the same noise.
"""

from prefgrpo.integrations.patching import CODEBASES, patch, unpatch

__all__ = ["CODEBASES", "patch", "unpatch"]

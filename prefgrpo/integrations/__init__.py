"""Drop-in step functions for other GRPO codebases, based on the fused ops.

`patch("flow_grpo")` replaces the step functions of an imported codebase by this package's, with the same names,
signatures and return order; `unpatch` restores them. The functions can also be imported from the modules here;
`lora.fuse_lora` makes peft's LoRA layers faster, `rotary.fuse_rotary` diffusers' rotary embedding, and
`diffusers.SDEFlowMatchScheduler` is a scheduler for any pipeline.
Intended differences: docs/integrations.md.
Invariant: in fp32 the results are the peer's within rounding, and the same torch generator gives the same noise.
"""

from prefgrpo.integrations.patching import CODEBASES, patch, unpatch

__all__ = ["CODEBASES", "patch", "unpatch"]

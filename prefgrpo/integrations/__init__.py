"""Drop-ins for other GRPO codebases, over the fused ops.

`patch("flow_grpo")` puts this package's step functions in place of those of an imported codebase, with their names,
signatures and return order; `unpatch` takes them out again. The functions can also be imported from the modules here,
and `diffusers.SDEFlowMatchScheduler` is a scheduler for any pipeline. What differs on purpose: docs/integrations.md.
Invariant: in fp32 the results are the peer's within rounding, and the same torch generator gives the same noise.
"""

from prefgrpo.integrations.patching import CODEBASES, patch, unpatch

__all__ = ["CODEBASES", "patch", "unpatch"]

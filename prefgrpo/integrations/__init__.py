"""Drop-in step functions for other GRPO codebases, based on the fused ops.

Each module here has a codebase's functions under their own names, to import in one line; `diffusers` has a scheduler
for any pipeline. Intended differences: docs/ops.md.
Invariant: in fp32 the results are the peer's within rounding, and the same torch generator gives the same noise.
"""

"""The drop-ins that docs/ops.md writes on the public ops, as functions with the peers' signatures."""

import re
from pathlib import Path
from types import SimpleNamespace

DOC = Path(__file__).resolve().parent.parent / "docs" / "ops.md"


def block(title):
    """What the Python block that begins with the comment `title` defines."""
    (code,) = [b for b in re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.S | re.M) if b.startswith(title)]
    names = {}
    exec(compile(code, DOC, "exec"), names)
    return SimpleNamespace(**names)


def unirl(rule, *args, **options):
    """UniRL's `denoise` of the strategy of this name."""
    return block("# UniRL").denoise(SimpleNamespace(canonical_name=rule), *args, **options)


mix_grpo = block("# MixGRPO")
"""MixGRPO's steps."""

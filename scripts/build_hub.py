"""`python scripts/build_hub.py FOLDER`: packages the ops in the layout of the Hugging Face `kernels` hub.

FOLDER/build/torch-universal holds prefgrpo.ops, its Triton kernels, and the step rules and schedules of prefgrpo.sde,
in pure Python. `kernels.get_local_kernel(FOLDER)` loads it, and FOLDER can be uploaded as a hub repository. The hub
requires relative imports and torch ops under a unique name, so imports are rewritten; nothing else changes. CUDA and
C++ are left out, because the hub accepts only extensions from its own builder, linked against torch's ABI, which ours
is not.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"ops": ROOT / "prefgrpo" / "ops", "sde": ROOT / "prefgrpo" / "sde", "kernels": ROOT / "kernels"}
VERSION = 1
"""Version of the hub's kernel; increase it when a function's arguments change."""
INIT = '''"""prefgrpo.ops, fused ops of RL for flow models; `rows`, `rules` and `schedule` are of prefgrpo.sde."""

from .ops import *
from .ops import __all__
from .sde import rows, rules, schedule
'''


def build(folder: Path) -> Path:
    """Write the build variant into `folder`, replacing an earlier one; returns its path."""
    variant = folder / "build" / "torch-universal"
    shutil.rmtree(variant, ignore_errors=True)
    for name, source in PACKAGES.items():
        (variant / name).mkdir(parents=True)
        for path in source.glob("*.py"):
            text = re.sub(r"^(\s*from )prefgrpo\.", r"\1..", path.read_text(), flags=re.MULTILINE)
            (variant / name / path.name).write_text(text)
    (variant / "__init__.py").write_text(INIT)
    shutil.copy(ROOT / "LICENSE", folder)
    metadata = {
        "id": f"prefgrpo_ops_v{VERSION}",
        "name": "prefgrpo-ops",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    return variant


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(build(Path(sys.argv[1])))

"""Makes torchvision's CUDA wheel importable with a CPU torch (open_clip and vLLM's Qwen video processors need it).

The wheel's C++ library cannot be loaded without CUDA, so its operators are never registered and the import fails
when torchvision refers to them. Declaring their schemas first is enough for everything in Python; the C++
operators themselves (nms, image decoding) stay unavailable.

    VENV/bin/python scripts/torchvision_cpu.py     puts this file and a .pth into VENV if its torchvision needs it
"""

import importlib.abc
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # a torch.library.Library removes its schemas when it is garbage-collected


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Import hook that declares the schemas when torchvision is first imported."""

    declared = False

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Declare the schemas; finds no module."""
        if fullname == "torchvision" and not self.declared:
            self.declared = True
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in SCHEMAS:
                library.define(schema)
            _libraries.append(library)


def install() -> None:
    """Copy this module into the current environment if importing torchvision fails only because CUDA is missing."""
    import torch

    if torch.version.cuda or torch.version.hip or "torchvision::nms does not exist" not in _import_error():
        return
    site = Path(sysconfig.get_paths()["purelib"])
    shutil.copy(__file__, site / "torchvision_cpu.py")
    (site / "torchvision_cpu.pth").write_text("import torchvision_cpu\n")
    if error := _import_error():
        sys.exit(f"torchvision cannot be imported with this torch, even with its operators declared:\n{error}")


def _import_error() -> str:
    """Error of `import torchvision` in a new process; empty if it works or torchvision is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        return ""
    result = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    return result.stderr if result.returncode else ""


if __name__ == "__main__":
    install()
else:
    sys.meta_path.insert(0, DeclareOperators())

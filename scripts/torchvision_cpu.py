"""Lets torchvision's CUDA wheel be imported beside a CPU torch (vLLM's Qwen video processors need its transforms).

The wheel's C++ library cannot be loaded without CUDA, so its operators are never registered and the import fails
when torchvision describes them to torch. Declaring their schemas first is enough for everything in Python; the C++
operators themselves (nms, image decoding) stay unavailable. Installed by setup_vllm_cpu.sh through a .pth file.
"""

import importlib.abc
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # a torch.library.Library withdraws its schemas when it is collected


class DeclareFirst(importlib.abc.MetaPathFinder):
    """Declares the schemas when torchvision is first looked for, then steps aside."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Find nothing: only the moment of the call matters."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in SCHEMAS:
                library.define(schema)
            _libraries.append(library)


sys.meta_path.insert(0, DeclareFirst())

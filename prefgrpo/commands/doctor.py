"""`prefgrpo doctor`: versions, and whether each op backend computes the right step on this machine.

Invariant: anything missing or failing is reported as a line and never raises.
"""

from __future__ import annotations

import importlib.metadata

import torch
from torch.utils.collect_env import get_env_info

from prefgrpo import __version__
from prefgrpo.ops import sde_step
from prefgrpo.ops._backend import BACKENDS, backend_of, unavailable_reason, use_backend

PACKAGES = ("numpy", "diffusers", "transformers", "peft", "accelerate", "safetensors", "aiohttp", "triton", "kernels",
            "flash-attn-4", "torchvision", "open-clip-torch", "imageio-ffmpeg")  # fmt: skip
ENVIRONMENT = ("python_version", "torch_version", "cuda_compiled_version", "cuda_runtime_version",
               "nvidia_driver_version", "nvidia_gpu_models")  # fmt: skip
"""The results of torch.utils.collect_env that are printed."""
COEF = torch.tensor([(0.9, -0.1, 0.3, -5.0, 0.25), (1.0, -0.05, 0.0, 0.0, 0.0)])
"""An SDE row and an ODE row (a, b, s, w, c)."""


def doctor() -> int:
    """Show versions, and compare each op backend with the reference; returns 1 if one is wrong, else 0."""
    found = get_env_info()
    versions = {name.replace("_", " "): getattr(found, name) or "none" for name in ENVIRONMENT}
    there = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    results = {name: _compared(name) for name in BACKENDS}
    rows = {"prefgrpo": __version__} | versions | {name: there.get(name, "not installed") for name in PACKAGES}
    rows |= {f"ops: {name}": detail for name, (_, detail) in results.items()}
    for name, text in rows.items():
        print(f"{name:<24} {text}".replace("\n", f"\n{'':25}"))
    return int(any(wrong for wrong, _ in results.values()))


def _compared(name: str) -> tuple[bool, str]:
    """(whether the backend is wrong, a line about it): its affine step and log-prob against the reference's."""
    if reason := unavailable_reason(name):
        return False, f"not available: {reason}"
    device = torch.device("cuda" if name in ("cuda", "triton") and torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    x, v, eps = (torch.randn(4, 3, 67, generator=generator).to(device) for _ in range(3))  # vector lanes and a tail
    coef = COEF.to(device)
    index = torch.tensor([0, 1, 0, 1]).to(device)
    try:
        with use_backend(name):
            served = backend_of(device, x.dtype)
            got = sde_step(x, v, coef, index, noise=eps)
        with use_backend("torch"):
            expected = sde_step(x, v, coef, index, noise=eps)
    except Exception as error:  # noqa: BLE001 - third-party compilers, drivers and kernels may raise anything
        return True, f"{type(error).__name__}: {str(error).strip()[:160]}"
    dx, dl = (float((g - e).abs().max()) for g, e in zip(got[:2], expected[:2], strict=True))
    wrong = served != name or not (dx < 1e-6 and dl < 1e-5)
    return wrong, f"{'WRONG' if wrong else 'ok'} on {device}: differs by {dx:.1e} in x', {dl:.1e} in log-prob"

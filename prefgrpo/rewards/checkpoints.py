"""What every reward that loads weights needs: files from a folder or the hub, a device, errors that say what to do.

Invariant: nothing that goes wrong while a model is loaded is anything but a RewardError that names the model.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from prefgrpo.rewards.base import RewardError
from prefgrpo.rewards.base import library as library

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Turn whatever a library raises for a bad, wrong or absent checkpoint into a RewardError that names `model`."""
    broken: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, KeyError, TypeError, EOFError)
    broken += (AttributeError, pickle.UnpicklingError, library("safetensors", "safetensors").SafetensorError)
    try:
        yield
    except RewardError:
        raise
    except broken as error:
        raise RewardError(
            f"cannot load '{model}': {type(error).__name__}: {str(error)[:500]}. Expected a folder, a file or a hub id "
            "with a complete checkpoint of this reward; download it again or give another in the reward's options"
        ) from error


def device_of(name: str) -> torch.device:
    """`auto`: cuda where there is one, else cpu; else the device of that name."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RewardError(f"device must be auto, cpu or a GPU of this machine (cuda, cuda:1), got '{name}'") from error


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name."""
    if name not in DTYPES:
        raise RewardError(f"dtype must be one of {', '.join(DTYPES)}, got '{name}'")
    return DTYPES[name]


def folder_of(model: str, patterns: Sequence[str]) -> Path:
    """The folder `model`, or a copy of the hub repository's files that match the patterns."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise RewardError(f"'{model}' is no folder and no hub id (owner/name)")
    from huggingface_hub import snapshot_download

    with loading(model):
        return Path(snapshot_download(model, allow_patterns=list(patterns)))


def check_shapes(model: torch.nn.Module, shapes: dict[str, tuple[int, ...]], name: str) -> None:
    """Raise RewardError if a tensor of the file has another shape than the model's: a loader might resize it."""
    here = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    other = sorted(k for k in here.keys() & shapes if _plain(shapes[k]) != _plain(here[k]))
    if other:
        found = "; ".join(f"{k} is {shapes[k]}, expected {here[k]}" for k in other[:3])
        raise RewardError(
            f"the weights of '{name}' do not fit the architecture: {found}. Give the architecture that they were "
            "trained with (its name tells image size and activation)"
        )


def shapes_of(file: Path) -> dict[str, tuple[int, ...]]:
    """{name: shape} of a .safetensors or torch file, read without its values or any pickled code."""
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, "pt") as tensors:
            return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    loaded = torch.load(file, map_location="meta", weights_only=True)
    tensors = loaded.get("state_dict", loaded)
    return {key.removeprefix("module."): tuple(tensor.shape) for key, tensor in tensors.items()}


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A scalar and a vector of one are the same to every loader."""
    return () if shape == (1,) else shape

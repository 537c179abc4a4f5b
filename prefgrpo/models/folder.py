"""Locating and loading diffusers pipeline folders, with reproducible weights.

Invariant: two loads of one folder give bitwise equal models. safetensors may map parameters at unaligned addresses,
which changes the last bits of a matrix product, so every parameter is copied before it is used.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from prefgrpo.config.recipe import UserError

REQUIRED_PROCESSOR = "Qwen3VLProcessor"
"""Class of a processor that the pipeline's constructor needs."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
"""A hub id 'owner/name' or 'owner/name@revision'."""


class ModelError(UserError, ValueError):
    """A model cannot be loaded; the message says what was expected and what to do."""


def resolve(model: str, pipeline: str) -> Path:
    """Local folder of `model`: a folder, or a hub id 'owner/name' or 'owner/name@revision', downloaded unless cached.

    A name that looks like a path is never looked up on the hub. Raises ModelError if the model is not found, or its
    pipeline class is not `pipeline`.
    """
    path = locate(model)
    actual = index_of(path).get("_class_name")
    if actual != pipeline:
        raise ModelError(f"'{path}' contains a {actual}, expected a {pipeline}: set `family` to this model's family")
    return path.resolve()


def locate(model: str, configs_only: bool = False) -> Path:
    """`resolve` without the check of the pipeline class. configs_only: download only JSON files."""
    path = Path(model).expanduser()
    if not path.is_dir():
        is_id = HUB_ID.fullmatch(model) and not Path(model.split("/")[0]).is_dir()
        if not is_id:
            raise ModelError(
                f"model folder not found: '{model}' (looked in {Path.cwd()}); expected a diffusers pipeline folder "
                f"(with model_index.json) or a hub id like 'owner/name'"
            )
        path = _from_hub(model, configs_only)
    if not (path / "model_index.json").is_file():
        raise ModelError(f"'{path}' is not a diffusers pipeline folder: it has no model_index.json")
    return path


def hub_id(model: str) -> tuple[str, str | None]:
    """Split 'owner/name@revision' into (owner/name, revision); the revision is None if absent."""
    name, _, revision = model.partition("@")
    return name, revision or None


def index_of(path: Path) -> dict[str, Any]:
    """Content of model_index.json: settings, and [library, class] of every component ([None, None]: absent)."""
    return json.loads((path / "model_index.json").read_text())


def _from_hub(model: str, configs_only: bool) -> Path:
    """Local snapshot of a hub repository, or of its JSON files only."""
    from diffusers import DiffusionPipeline
    from huggingface_hub import snapshot_download

    name, revision = hub_id(model)
    try:
        if configs_only:
            return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json"]))
        return Path(DiffusionPipeline.download(name, revision=revision))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"'{model}' is not a folder in {Path.cwd()}, and could not be fetched from the hub as a model id: {error}"
        ) from error


def _is_encoder(name: str) -> bool:
    """Whether a component helps to encode prompts (and their source images) into conditions."""
    return name.startswith(("text_encoder", "tokenizer", "processor", "image_encoder", "image_processor", "connectors"))


def read(
    path: Path,
    pipeline: str,
    dtype: torch.dtype,
    device: torch.device,
    encoders: bool,
    split: Collection[str] = (),
    waiting: Collection[str] = (),
    in_fp32: Collection[str] = (),
) -> Any:
    """Load the pipeline in `path`: frozen, in eval mode, on `device`; text encoders only if `encoders`.

    Components in `split` and `waiting` stay mapped files in CPU memory, which the processes of a machine share, until
    they are copied elsewhere; those in `split` have the dtype of the file, as a cast would be a copy. All others go to
    the device tensor by tensor, without a second copy in CPU memory. in_fp32: components that run in fp32 whatever
    `dtype` is.
    """
    import diffusers

    named = {name: part for name, part in index_of(path).items() if _is_encoder(name)}
    parts: dict[str, Any] = {name: None for name, part in named.items() if not encoders or part[0] is None}
    dtypes = {"default": dtype} | dict.fromkeys(in_fp32, torch.float32)
    dtypes |= {name: stored_dtype(path / name) or dtype for name in split}
    own = {name: found for name, part in named.items() if (found := _processor(path / name, part[1] or "", encoders))}
    asked = {name: part for name, part in own.items() if type(part).__name__ == REQUIRED_PROCESSOR}
    pipe = getattr(diffusers, pipeline).from_pretrained(path, dtype=dtypes, **parts | dict.fromkeys(own) | asked)
    pipe.register_modules(**own)
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    for name, module in modules.items():
        module.eval().requires_grad_(False)
        for tensor in [*module.parameters(), *module.buffers()] if name not in {*split, *waiting} else ():
            tensor.data = tensor.data.to(device, copy=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def stored_dtype(component: Path) -> torch.dtype | None:
    """The dtype of most elements in a component's safetensors files; None if it has no such file."""
    count: Counter[str] = Counter()
    for file in component.glob("*.safetensors"):
        if file.name.count(".") > 1:  # a variant, such as "….fp16.safetensors"
            continue
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        header.pop("__metadata__", None)
        for tensor in header.values():
            count[tensor["dtype"]] += math.prod(tensor["shape"])
    named = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return named.get(count.most_common(1)[0][0]) if count else None


def _processor(path: Path, kind: str, encoders: bool) -> Any:
    """The folder's processor as a class that needs no torchvision; None if not needed, or if there is no such class."""
    if not kind.endswith("Processor") or not (encoders or kind == REQUIRED_PROCESSOR):
        return None
    from prefgrpo.models import processors

    own = getattr(processors, kind, None)
    return own.from_pretrained(path) if own else None


def complete(pipe: Any, path: Path) -> None:
    """Copy the text encoders that `read` skipped from the original folder into a saved pipeline folder."""
    origin = Path(pipe.name_or_path)
    whole, saved = index_of(origin), index_of(path)
    for name in (n for n in whole if _is_encoder(n) and whole[n] != saved.get(n) and (origin / n).is_dir()):
        shutil.copytree(origin / name, path / name, dirs_exist_ok=True)
        saved[name] = whole[name]
    (path / "model_index.json").write_text(json.dumps(saved, indent=2) + "\n")


def encoder_identity(path: Path) -> str:
    """What embeddings by the encoders in this folder are stored under: 'owner/name@commit' for a snapshot from the hub,
    else the folder, with name, size and time of every file of the text encoders, the tokenizers and the VAE."""
    if path.parent.name == "snapshots":
        return f"{path.parent.parent.name.removeprefix('models--').replace('--', '/')}@{path.name}"
    parts = [part for part in path.iterdir() if _is_encoder(part.name) or part.name == "vae"]
    files = sorted(file for part in parts for file in part.rglob("*") if file.is_file())
    facts = [(file.relative_to(path).as_posix(), file.stat()) for file in files]
    return "\n".join([str(path), *(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in facts)])

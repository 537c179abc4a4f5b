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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from prefgrpo.config.recipe import UserError

ENCODERS = ("text_encoder", "image_encoder", "connectors")
"""Prefixes of the names of the modules that make conditions from prompts and source images."""
KINDS: dict[str, tuple[str, ...]] = {"text_encoder": ENCODERS, "vae": ("vae",)}
"""Kind of part that can be offloaded → prefixes of its modules' names."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
"""A hub id 'owner/name' or 'owner/name@revision'."""


class ModelError(UserError, ValueError):
    """A model cannot be loaded; the message says what was expected and what to do."""


def locate(model: str, configs_only: bool = False) -> Path:
    """Local folder of `model`: a folder, or a hub id 'owner/name' or 'owner/name@revision', downloaded unless cached.

    A name that looks like a path is never looked up on the hub. configs_only: download only JSON files. Raises
    ModelError if there is no pipeline.
    """
    path = Path(model).expanduser()
    if path.is_file():
        convert = "diffusers' `from_single_file(FILE)` and `save_pretrained(FOLDER)` write one"
        raise ModelError(f"'{model}' is a single file: expected a diffusers pipeline folder; {convert}")
    if not path.is_dir():
        if not is_hub_id(model):
            raise ModelError(
                f"model folder not found: '{model}' (looked in {Path.cwd()}); expected a diffusers pipeline folder "
                f"(with model_index.json) or a hub id like 'owner/name'"
            )
        path = _from_hub(model, configs_only)
    if not (path / "model_index.json").is_file():
        raise ModelError(f"'{path}' is not a diffusers pipeline folder: it has no model_index.json")
    return path.resolve()


def check_weights(path: Path, components: Iterable[str]) -> str | None:
    """The variant (such as fp16) of the safetensors files of these components; None if each has plain ones.

    Raises ModelError for a file that is missing or cut.
    """
    again = "download the model again, or copy the file"
    variants: set[str] = set()
    for component in components:
        files = sorted((path / component).glob("*.safetensors"))
        for listing in (path / component).glob("*.safetensors.index*.json"):
            shards = json.loads(listing.read_text(encoding="utf-8"))["weight_map"].values()
            if missing := sorted(set(shards) - {file.name for file in files}):
                raise ModelError(f"{path / component / missing[0]} is missing, which {listing.name} names: {again}")
        for file in files:
            try:
                with safe_open(file, "pt"):
                    pass
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is cut or damaged ({error}): {again}") from error
        found = {file.name.split(".")[1].split("-")[0] for file in files}  # model.fp16-00001-of-00002.safetensors
        variants |= found if "safetensors" not in found else set()
    return min(variants, default=None)


def is_hub_id(model: str) -> bool:
    """Whether a model is looked up on the hub: its name is no folder, and does not look like a path."""
    return bool(HUB_ID.fullmatch(model)) and not Path(model).is_dir() and not Path(model.split("/")[0]).is_dir()


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
        why = "it is not complete in the hub's cache" if "not fully cached" in str(error) else str(error)
        download = f"hf download {model.replace('@', ' --revision ')} --local-dir FOLDER"
        raise ModelError(
            f"'{model}' is not a folder in {Path.cwd()}, and could not be fetched from the hub as a model id: {why}\n"
            f"Without network, run `{download}` where there is one, and pass the folder as --model"
        ) from error


def named(names: Iterable[str], kinds: Iterable[str]) -> list[str]:
    """Which of these modules belong to one of these kinds; other kinds have none."""
    prefixes = tuple(prefix for kind in kinds for prefix in KINDS.get(kind, ()))
    return [name for name in names if name.startswith(prefixes)]


def stored_dtype(component: Path) -> torch.dtype | None:
    """The dtype of most elements in a component's safetensors files; None if it has no such file."""
    count: Counter[str] = Counter()
    for file in component.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (it is no mapping)
                part = tensors.get_slice(key)
                count[part.get_dtype()] += math.prod(part.get_shape())
    named = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return named.get(count.most_common(1)[0][0]) if count else None


def complete(pipe: Any, path: Path) -> None:
    """Copy the encoders that `read` skipped from the original folder into a saved pipeline folder."""
    origin = Path(pipe.name_or_path)
    whole = index_of(origin)
    saved = index_of(path)
    for name in (n for n in whole if n.startswith(ENCODERS) and whole[n] != saved.get(n) and (origin / n).is_dir()):
        shutil.copytree(origin / name, path / name, dirs_exist_ok=True)
        saved[name] = whole[name]
    (path / "model_index.json").write_text(json.dumps(saved, indent=2) + "\n")


def encoder_identity(path: Path) -> str:
    """What embeddings by this folder's encoders are stored under: 'owner/name@commit' for a snapshot from the hub, else
    the folder, with name, size and time of every file of the encoders, tokenizers, processors and the VAE."""
    if path.parent.name == "snapshots":
        return f"{path.parent.parent.name.removeprefix('models--').replace('--', '/')}@{path.name}"
    kinds = (*ENCODERS, "tokenizer", "processor", "image_processor", "vae")
    parts = [part for part in path.iterdir() if part.name.startswith(kinds)]
    files = sorted(file for part in parts for file in part.rglob("*") if file.is_file())
    facts = [(file.relative_to(path).as_posix(), file.stat()) for file in files]
    return "\n".join([str(path), *(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in facts)])

"""Locating and loading diffusers pipeline folders, with reproducible weights.

Invariant: two loads of one folder give bitwise equal models. safetensors may map parameters at unaligned addresses,
which changes the last bits of a matrix product, so every parameter is copied before it is used.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from prefgrpo.config.recipe import UserError

ENCODERS = ("text_encoder", "image_encoder", "connectors")
"""Name prefixes of the modules that encode prompts and source images."""
KINDS: dict[str, tuple[str, ...]] = {"text_encoder": ENCODERS, "vae": ("vae",)}
"""Kind of part that can be offloaded → name prefixes of its modules."""
INDEX = ("model_index.json", "modular_model_index.json")
"""Index of a pipeline's folder, or of a modular pipeline's."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
"""A hub id 'owner/name' or 'owner/name@revision'."""


class ModelError(UserError, ValueError):
    """A model cannot be loaded; the message says what was expected and what to do."""


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which diffusers shows its progress bars on a terminal only."""
    from diffusers.utils import logging

    hidden = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()


def locate(model: str, configs_only: bool = False, not_read: tuple[str, ...] = ()) -> Path:
    """Local folder of `model`: a folder, or a hub id 'owner/name' or 'owner/name@revision', downloaded unless cached.

    A name that looks like a path is never looked up on the hub. configs_only: download only JSON files. not_read:
    prefixes of components that need not be there. Raises ModelError if there is no pipeline.
    """
    path = Path(model).expanduser()
    if path.is_file():
        convert = "diffusers' `from_single_file(FILE)` and `save_pretrained(FOLDER)` write one"
        raise ModelError(f"'{model}' is a single file: expected a diffusers pipeline folder; {convert}")
    if not path.is_dir():
        if not is_hub_id(model):
            raise ModelError(
                f"model folder not found: '{model}' (looked in {Path.cwd()}); expected a diffusers pipeline folder "
                f"(with {' or '.join(INDEX)}) or a hub id like 'owner/name'"
            )
        path = _from_hub(model, configs_only, not_read)
    if not any((path / name).is_file() for name in INDEX):
        raise ModelError(f"'{path}' is not a diffusers pipeline folder: it has no {' and no '.join(INDEX)}")
    whole = path.resolve()
    try:
        str(whole).encode()
    except UnicodeEncodeError as error:
        name = os.fsencode(whole)
        raise ModelError(
            f"the model's path {name!r} is not UTF-8, which tokenizers and safetensors cannot open: rename its folder"
        ) from error
    return whole


def check_weights(path: Path, components: Iterable[str]) -> str | None:
    """The variant (such as fp16) of the safetensors files of these components; None if each has plain ones.

    Raises ModelError for a file that is missing or truncated.
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


def check_denoisers(path: Path, denoisers: Iterable[str]) -> None:
    """Raise ModelError for a denoiser that was stored quantised, which neither a LoRA nor an optimiser here can
    train."""
    for name in denoisers:
        file = path / name / "config.json"
        how = json.loads(file.read_text(encoding="utf-8")).get("quantization_config") if file.is_file() else None
        if how:
            expected = "expected weights in fp32, fp16 or bf16; fp8_base quantises those of a frozen base at the start"
            raise ModelError(f"{file}: the weights are quantised ({how.get('quant_method', how)}): {expected}")


def check_tokenizers(path: Path, components: Iterable[str]) -> None:
    """Raise ModelError for a tokenizer without any of its vocabulary's files: transformers would make an empty one."""
    import transformers

    index = index_of(path)
    for component in components:
        kind = getattr(transformers, index[component][1], None)
        names = sorted(getattr(kind, "vocab_files_names", {}).values())
        if names and not any((path / component / name).is_file() for name in names):
            expected = f"expected {' or '.join(names)} in {path / component}"
            raise ModelError(f"a tokenizer without its vocabulary: {expected}; download the model again, or copy it")


def is_hub_id(model: str) -> bool:
    """Whether a model is looked up on the hub: its name is not a folder, and does not look like a path."""
    return bool(HUB_ID.fullmatch(model)) and not Path(model).is_dir() and not Path(model.split("/")[0]).is_dir()


def hub_id(model: str) -> tuple[str, str | None]:
    """Split 'owner/name@revision' into (owner/name, revision); the revision is None if absent."""
    name, _, revision = model.partition("@")
    return name, revision or None


def index_of(path: Path) -> dict[str, Any]:
    """Content of the index: settings, and [library, class] of every component ([None, None]: absent).

    Where it is a modular pipeline's, components also say where they are; they are read from the folder itself.
    """
    return {name: _component(part) if _of_modular(part) else part for name, part in _index(path).items()}


def components_of(path: Path) -> dict[str, list[str | None]]:
    """[library, class] of every component in the index, whose settings may be lists, too (Krea-2)."""
    lists = {name: value for name, value in index_of(path).items() if isinstance(value, list) and len(value) == 2}
    return {name: value for name, value in lists.items() if all(one is None or isinstance(one, str) for one in value)}


def _index(path: Path) -> dict[str, Any]:
    return json.loads(_index_file(path).read_text(encoding="utf-8"))


def _index_file(path: Path) -> Path:
    """A folder with both is the stock pipeline's."""
    return next(path / name for name in INDEX if (path / name).is_file())


def _of_modular(part: Any) -> bool:
    return isinstance(part, list) and len(part) == 3 and isinstance(part[2], dict)


def _component(part: list[Any]) -> list[Any]:
    """[library, class] of a component of a modular index, also where the pipeline was saved without it."""
    return part[:2] if part[0] else list(part[2].get("type_hint") or (None, None))


def _from_hub(model: str, configs_only: bool, not_read: tuple[str, ...]) -> Path:
    """Local snapshot of a hub repository, or of its JSON files only."""
    from diffusers import DiffusionPipeline
    from huggingface_hub import snapshot_download

    name, revision = hub_id(model)
    try:
        if configs_only:
            return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json"]))
        index = Path(snapshot_download(name, revision=revision, allow_patterns=list(INDEX)))
        if not (index / INDEX[1]).is_file() or (index / INDEX[0]).is_file():
            return Path(DiffusionPipeline.download(name, revision=revision))
        parts = [part for part, value in _index(index).items() if _of_modular(value) and not part.startswith(not_read)]
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*INDEX, *(f"{p}/*" for p in parts)]))
    except (OSError, ValueError) as error:
        why = "it is not complete in the hub's cache" if "not fully cached" in str(error) else str(error)
        download = f"hf download {model.replace('@', ' --revision ')} --local-dir FOLDER"
        raise ModelError(
            f"'{model}' is not a folder in {Path.cwd()}, and could not be fetched from the hub as a model id: {why}\n"
            f"Without network, run `{download}` where there is one, and pass the folder as --model"
        ) from error


def named(names: Iterable[str], kinds: Iterable[str]) -> list[str]:
    """The modules that belong to one of these kinds."""
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


def without_weights(component: Path, name: str) -> Any:
    """A component of diffusers' class `name`, from its configuration alone: a module is on torch's meta device.

    Raises ModelError if diffusers has no such class, or the class refuses the configuration.
    """
    import diffusers

    if not hasattr(diffusers, name):
        raise ModelError(f"'{component}': diffusers {diffusers.__version__} has no {name}: a newer one may have it")
    kind = getattr(diffusers, name)
    try:
        with torch.device("meta" if issubclass(kind, torch.nn.Module) else "cpu"):
            return kind.from_config(kind.load_config(component))
    except Exception as error:  # a class of diffusers may raise anything
        raise ModelError(
            f"'{component}': {name} refuses its configuration ({type(error).__name__}: {error})"
        ) from error


def complete(pipe: Any, path: Path) -> None:
    """Copy the components that `read` skipped from the original folder into a saved pipeline folder."""
    origin = Path(pipe.name_or_path)
    saved = _index(path)
    for name, part in _index(origin).items():
        if isinstance(part, list) and saved.get(name, [None])[0] is None:
            saved[name] = part
            if (origin / name).is_dir():
                shutil.copytree(origin / name, path / name, dirs_exist_ok=True)
    _index_file(path).write_text(json.dumps(saved, indent=2) + "\n")


def encoder_identity(path: Path) -> str:
    """Cache key of embeddings by this folder's encoders: 'owner/name@commit' for a snapshot from the hub, else the
    folder with name, size and time of every file of the encoders, tokenizers, processors and the VAE."""
    if path.parent.name == "snapshots":
        return f"{path.parent.parent.name.removeprefix('models--').replace('--', '/')}@{path.name}"
    kinds = (*ENCODERS, "tokenizer", "processor", "image_processor", "vae")
    parts = [part for part in path.iterdir() if part.name.startswith(kinds)]
    files = sorted(file for part in parts for file in part.rglob("*") if file.is_file())
    facts = [(file.relative_to(path).as_posix(), file.stat()) for file in files]
    return "\n".join([str(path), *(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in facts)])

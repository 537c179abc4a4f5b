"""Families whose diffusers pipeline is modular: blocks over components, in a folder with modular_model_index.json.

Such a folder contains the models only: scheduler, guider and image processor come from the blocks' code, and changes to
them are not saved. The blocks are not run here, except for static functions of theirs: an adapter uses the components,
as with any pipeline, so loading, outline and saving are those of `base` and `weights`.
Invariant: what is written loads with stock `ModularPipeline.from_pretrained`, even after it was moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from prefgrpo.models import folder as folders
from prefgrpo.models.base import Adapter


class ModularAdapter(Adapter):
    """An adapter of a modular pipeline; blocks named in `not_read` are left out, with their components."""

    @classmethod
    def open_pipeline(cls, path: Path, parts: dict[str, Any], **options: Any) -> Any:
        """As in `Adapter`. Raises `folder.ModelError` for a component that is not in the folder, or cannot be read:
        diffusers' `load_components` logs it and continues without it."""
        import diffusers

        kind = getattr(diffusers, cls.pipeline)
        blocks = getattr(diffusers, kind.default_blocks_name)()
        for name in cls.not_read:
            blocks.sub_blocks.pop(name)
        pipe = kind(blocks=blocks, pretrained_model_name_or_path=str(path))
        pipe.name_or_path = str(path)
        given = {name: part for name, part in parts.items() if name in pipe.components}
        read = [name for name in pipe.pretrained_component_names if name not in given]
        pipe.register_components(**given, **{name: _component(pipe, path, name, **options) for name in read})
        return pipe

    def _register(self, modules: Mapping[str, nn.Module]) -> None:
        self.pipe.register_components(**modules)

    def _save(self, folder: str) -> None:
        self.pipe.save_pretrained(folder, overwrite_modular_index=True)


def _component(pipe: Any, path: Path, name: str, dtype: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """A component of the folder; dtype: by component, and "default"."""
    spec = pipe.get_component_spec(name)
    if not (path / name).is_dir():
        index = spec.pretrained_model_name_or_path
        elsewhere = f"its index says '{index}'" if index else "its index does not name it"
        raise folders.ModelError(f"'{path}' has no folder {name} ({elsewhere}): download or copy it to {path / name}")
    own = {} if dtype is None else {"dtype": dtype.get(name, dtype["default"])}
    try:
        return spec.load(pretrained_model_name_or_path=str(path), subfolder=name, **own, **options)
    except ValueError as error:  # the specification's error, around whatever the library raised
        raise folders.ModelError(f"'{path / name}' cannot be loaded: {error}") from error

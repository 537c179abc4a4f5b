"""Trainable weights of a family's denoisers, LoRA layers or all weights, and their files.

Invariant: saved files have the same effect in the stock pipeline and when they are loaded here again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch import nn

from prefgrpo.models import folder as folders
from prefgrpo.models import lora


def innermost(module: nn.Module, classes: Iterable[str]) -> list[nn.Module]:
    """The modules of these classes that contain no other module of these classes, in order."""
    names = set(classes)

    def named(part: nn.Module) -> bool:  # FSDP2 replaces classes by subclasses
        return any(cls.__name__ in names for cls in type(part).__mro__)

    return [m for m in module.modules() if [n for n in m.modules() if named(n)] == [m]]


class Weights:
    """The trainable half of an `Adapter`."""

    lora_targets: ClassVar[tuple[str, ...]]
    """Module name suffixes that LoRA wraps by default."""
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    """The pipeline's denoisers; if several, they are experts for different σ."""
    comfy_names: ClassVar[tuple[tuple[str, str], ...] | None] = ()
    """Replacements (pattern, text) from diffusers' names of LoRA tensors to ComfyUI's; (): it reads diffusers' names;
    None: it has no names for these layers."""

    pipe: Any
    """The stock diffusers pipeline."""
    transformer: nn.Module
    """The (first) denoiser (peft adapters are injected into it in place)."""
    trained: tuple[str, ...]
    """Names of the trained denoisers."""
    compiled = False
    """Whether the repeated blocks are compiled. Without gradients Inductor makes other graphs, which round differently,
    so every forward then uses the training graph (`Adapter.velocity`), and keeps activations while it runs."""

    def modules(self) -> dict[str, nn.Module]:
        """The trained denoisers, by name."""
        return {name: getattr(self.pipe, name) for name in self.trained}

    @property
    def repeated_blocks(self) -> tuple[str, ...]:
        """Class names of the transformer's repeated blocks: the units of regional compilation and of FSDP."""
        return tuple(self.transformer._no_split_modules or self.transformer._repeated_blocks)  # type: ignore[arg-type]

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """The repeated blocks of a denoiser in order; if nested, the innermost."""
        return innermost(module, self.repeated_blocks)

    def add_lora(
        self,
        rank: int,
        alpha: float,
        targets: tuple[str, ...] | None = None,
        seed: int = 0,
        init: Literal["kaiming", "gaussian"] = "kaiming",
    ) -> None:
        """Inject trainable fp32 LoRA layers (A seeded, B = 0) into the trained denoisers; see `lora.add`."""
        for number, module in enumerate(self.modules().values()):
            lora.add(module, rank, alpha, self.lora_targets if targets is None else targets, seed + number, init)

    def enable_full(self) -> None:
        """Train all weights of the denoisers. If their dtype is not fp32, FSDP2 makes the fp32 masters."""
        for module in self.modules().values():
            module.requires_grad_(True)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all trainable parameters, in a fixed order."""
        first = self.denoisers[0]
        return [
            (name if component == first else f"{component}.{name}", p)
            for component, module in self.modules().items()
            for name, p in module.named_parameters()
            if p.requires_grad
        ]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, `velocity` is the reference policy's: the LoRA is disabled. Raises RuntimeError without a LoRA."""
        if not self.has_lora():
            raise RuntimeError("there is no reference policy: a KL term needs LoRA")
        modules: list[Any] = list(self.modules().values())
        for module in modules:
            module.disable_adapters()
        compiled, self.compiled = self.compiled, False  # no parameter trains here, so there is no training graph
        try:
            yield
        finally:
            self.compiled = compiled
            for module in modules:
                module.enable_adapters()

    def has_lora(self) -> bool:
        """Whether a trained denoiser has a LoRA."""
        return any(lora.has(module) for module in self.modules().values())

    def lora_name(self, origin: str = "") -> str:
        """What the LoRA is, for messages; origin: where it was loaded from."""
        ranks = {module.peft_config[lora.NAME].r for module in self.modules().values()}  # type: ignore[union-attr,index]
        return f"LoRA rank {', '.join(map(str, sorted(ranks)))}" + (f" from {origin}" if origin else "")

    def save_lora(self, folder: str) -> None:
        """Write the LoRA in diffusers format, with alpha = rank (`lora.save`), for `pipe.load_lora_weights(folder)`.

        A second expert's LoRA goes into a subfolder of its name: `load_lora_weights(f"{folder}/transformer_2",
        load_into_transformer_2=True)`.
        """
        for name, place in self._lora_folders(folder):
            lora.save(self.pipe, place, name)

    def load_lora(self, folder: str) -> None:
        """Load a LoRA saved by `save_lora`, or a file; if the model has none, one of that shape is injected."""
        for name, place in self._lora_folders(folder):
            lora.load(self.pipe, place, name)

    def _lora_folders(self, folder: str) -> list[tuple[str, str]]:
        return [(name, folder if name == self.denoisers[0] else f"{folder}/{name}") for name in self.trained]

    def save_full(self, folder: str, copies: Mapping[str, nn.Module] = MappingProxyType({})) -> None:
        """Write a complete pipeline folder for the stock `from_pretrained`; `copies` replace denoisers in it."""
        if self.has_lora():
            raise RuntimeError("this policy is a LoRA: write it with save_lora (save_full is for full fine-tuning)")
        own = {name: getattr(self.pipe, name) for name in copies}
        for part in self.pipe.components.values():  # a tokenizer saves the padding of its last call
            if backend := getattr(getattr(part, "tokenizer", part), "backend_tokenizer", None):
                backend.no_padding()
                backend.no_truncation()
        try:
            self.pipe.register_modules(**copies)
            self.pipe.save_pretrained(folder)
        finally:
            self.pipe.register_modules(**own)
        folders.complete(self.pipe, Path(folder))

    def parameter_counts(self) -> dict[str, int]:
        """Number of parameters per pipeline component, and of trainable parameters under 'trainable'."""
        modules = {name: part for name, part in self.pipe.components.items() if isinstance(part, nn.Module)}
        counts = {name: sum(p.numel() for p in part.parameters()) for name, part in modules.items()}
        return counts | {"trainable": sum(p.numel() for _, p in self.trainable())}

"""What trains in a family's denoisers: LoRA layers or every weight, and their files.

Invariant: what is saved here loads in the stock pipeline (alpha included), and reloads here bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from prefgrpo.models import folder as folders
from prefgrpo.models import lora

GRAPHS = 64
"""Compiled graphs of a kind of block: one per shape, dtype and place of gradients."""


def innermost(module: nn.Module, classes: Iterable[str]) -> list[nn.Module]:
    """The modules of these classes that hold no other of them, in their order."""
    names = set(classes)

    def named(part: nn.Module) -> bool:  # FSDP2 makes subclasses of its own
        return any(cls.__name__ in names for cls in type(part).__mro__)

    return [m for m in module.modules() if [n for n in m.modules() if named(n)] == [m]]


def recompute(blocks: Iterable[nn.Module], share: float) -> None:
    """Checkpoint the gradients of every block i where floor((i + 1) · share) steps up: of ½, every second one.

    Blocks are called as without it; diffusers' own switch leaves arguments out of some models' calls.
    """
    for i, block in enumerate(blocks):
        if int((i + 1) * share) > int(i * share):
            block.forward = partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward`, whose activations are not kept for the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


class Weights:
    """The trainable half of an `Adapter`."""

    lora_targets: ClassVar[tuple[str, ...]]
    """Module name suffixes that LoRA wraps by default."""
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    """The pipeline's denoisers; several are experts for different σ."""

    pipe: Any
    """The stock diffusers pipeline."""
    transformer: nn.Module
    """The (first) denoiser (peft adapters are injected into it in place)."""
    trained: tuple[str, ...]
    """Names of the denoisers that train."""
    compiled = False
    """Whether the repeated blocks are compiled."""

    def modules(self) -> dict[str, nn.Module]:
        """The denoisers that train, by name."""
        return {name: getattr(self.pipe, name) for name in self.trained}

    @property
    def repeated_blocks(self) -> tuple[str, ...]:
        """Class names of the blocks that the transformer repeats: units of regional compile and of FSDP."""
        return tuple(self.transformer._no_split_modules or self.transformer._repeated_blocks)  # type: ignore[arg-type]

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """The repeated blocks of a denoiser in their order; of nested ones, the innermost."""
        return innermost(module, self.repeated_blocks)

    def add_lora(
        self,
        rank: int,
        alpha: float,
        targets: tuple[str, ...] | None = None,
        seed: int = 0,
        init: Literal["kaiming", "gaussian"] = "kaiming",
    ) -> None:
        """Inject trainable fp32 LoRA layers (A seeded, B = 0) into what trains; see `lora.add`."""
        for number, module in enumerate(self.modules().values()):
            lora.add(module, rank, alpha, self.lora_targets if targets is None else targets, seed + number, init)

    def enable_full(self) -> None:
        """Train every weight of the denoisers, in fp32 masters."""
        for module in self.modules().values():
            module.float().requires_grad_(True)

    def checkpoint_gradients(self, share: float = 1.0) -> None:
        """Recompute the activations of a share of the repeated blocks, evenly spread, in the backward pass."""
        for module in self.modules().values():
            recompute(self.blocks(module), share)

    def compile_blocks(self) -> None:
        """Compile the repeated blocks of all denoisers, a graph per shape.

        Inductor makes other graphs, with other roundings, where no gradient is wanted: from now on every forward is
        that of training (`Adapter.cond_uncond`), and holds its activations while it runs.
        """
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
        for name in self.denoisers:
            for block in self.blocks(getattr(self.pipe, name)):
                block.compile(dynamic=False)
        self.compiled = True

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of everything that trains, in a fixed order."""
        first = self.denoisers[0]
        return [
            (name if component == first else f"{component}.{name}", p)
            for component, module in self.modules().items()
            for name, p in module.named_parameters()
            if p.requires_grad
        ]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, `velocity` is that of the starting policy: the LoRA is off. Raises RuntimeError without a LoRA."""
        if not self.has_lora():
            raise RuntimeError("there is no reference policy: a KL term needs LoRA")
        modules: list[Any] = list(self.modules().values())
        for module in modules:
            module.disable_adapters()
        compiled, self.compiled = self.compiled, False  # nothing trains, so there is no graph of training
        try:
            yield
        finally:
            self.compiled = compiled
            for module in modules:
                module.enable_adapters()

    def has_lora(self) -> bool:
        """Whether a LoRA trains."""
        return any(lora.has(module) for module in self.modules().values())

    def save_lora(self, folder: str) -> None:
        """Write the LoRA in diffusers format with its alpha: `pipe.load_lora_weights(folder)` must reproduce it.

        A second expert's is in a folder of its name: `load_lora_weights(f"{folder}/transformer_2",
        load_into_transformer_2=True)`.
        """
        for name, place in self._lora_folders(folder):
            lora.save(self.pipe, place, name)

    def load_lora(self, folder: str) -> None:
        """Put a LoRA saved by `save_lora` into the model, bit for bit; injects one of its shape if there is none."""
        for name, place in self._lora_folders(folder):
            lora.load(self.pipe, place, name)

    def _lora_folders(self, folder: str) -> list[tuple[str, str]]:
        return [(name, folder if name == self.denoisers[0] else f"{folder}/{name}") for name in self.trained]

    def save_full(self, folder: str, copies: Mapping[str, nn.Module] = MappingProxyType({})) -> None:
        """Write a whole pipeline folder for the stock `from_pretrained`; `copies` are written in place of denoisers."""
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
        """Parameters per component of the pipeline, and of what trains, under 'trainable'."""
        modules = {name: part for name, part in self.pipe.components.items() if isinstance(part, nn.Module)}
        counts = {name: sum(p.numel() for p in part.parameters()) for name, part in modules.items()}
        return counts | {"trainable": sum(p.numel() for _, p in self.trainable())}

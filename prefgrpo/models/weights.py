"""Trainable weights of a family's denoisers, a LoRA or all weights, and their files.

A LoRA computes W x + (alpha / rank)·B A x, with fp32 masters over any base dtype. peft provides the layers; diffusers
reads and writes the file. A file has alpha = rank, with B multiplied by alpha / rank, because most programs (ComfyUI,
for example) ignore the header, where diffusers keeps alpha, and use the scale 1.
Invariants: the initial LoRA depends on (seed, shapes), not on device or rank; saved files have the same effect in the
stock pipeline, without their header, and when they are loaded here again.
"""

from __future__ import annotations

import glob
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from prefgrpo.models import folder as folders
from prefgrpo.models import lora_files

_saving = logging.getLogger("diffusers.pipelines.pipeline_utils")
_saving.addFilter(lambda record: "=None of type" not in record.getMessage())  # `folder.complete` copies what was None

JOINT_ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""Attention projections of blocks that process image and text jointly."""
NAME = "default"
"""Name of the trained LoRA inside peft."""
HUB_LORA = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:/([^@]+\.safetensors))?(?:@([\w./-]+))?")
"""A LoRA on the hub: repository, file, revision."""


class Weights:
    """The trainable half of an `Adapter`."""

    lora_targets: ClassVar[tuple[str, ...]]
    """Module name suffixes that LoRA wraps by default."""
    lora_within: ClassVar[str] = ""
    """Prefix of the layers that LoRA wraps by default."""
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    """The pipeline's denoisers; if several, they are experts for different σ."""
    comfy_names: ClassVar[tuple[tuple[str, str], ...] | None] = ()
    """Replacements (pattern, text) that turn diffusers' names of LoRA tensors into ComfyUI's; (): it reads diffusers'
    names; None: it has no names for these layers."""

    pipe: Any
    """The stock diffusers pipeline."""
    transformer: nn.Module
    """The (first) denoiser (peft adapters are injected into it in place)."""
    _lora_layers: Sequence[Any] = ()
    """The denoisers' layers with a LoRA, found when the reference policy is first needed."""
    compiled = False
    """Whether the repeated blocks are compiled. Without gradients, Inductor makes other graphs, which round
    differently, so every forward then uses the training graph (`Adapter.velocity`), and keeps activations while it
    runs."""

    def modules(self) -> dict[str, nn.Module]:
        """The denoisers, by name."""
        return {name: getattr(self.pipe, name) for name in self.denoisers}

    @property
    def repeated_blocks(self) -> tuple[str, ...]:
        """Class names of the transformer's repeated blocks: the units of regional compilation and of FSDP."""
        return tuple(self.transformer._no_split_modules or self.transformer._repeated_blocks)  # type: ignore[arg-type]

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """The repeated blocks of a denoiser in order; if nested, the innermost."""
        names = set(self.repeated_blocks)
        found = {
            m for m in module.modules() if names & {cls.__name__ for cls in type(m).__mro__}
        }  # FSDP2 makes subclasses
        return [m for m in module.modules() if found & set(m.modules()) == {m}]

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

    def save_full(self, folder: str, copies: Mapping[str, nn.Module] = MappingProxyType({})) -> None:
        """Write a complete pipeline folder for the stock `from_pretrained`; `copies` replace denoisers in it."""
        replaced = {name: getattr(self.pipe, name) for name in copies}
        for part in self.pipe.components.values():  # a tokenizer would save the padding of its last call
            if backend := getattr(getattr(part, "tokenizer", part), "backend_tokenizer", None):
                backend.no_padding()
                backend.no_truncation()
        try:
            self._register(copies)
            self._save(folder)
        finally:
            self._register(replaced)
        folders.complete(self.pipe, Path(folder))

    def _register(self, modules: Mapping[str, nn.Module]) -> None:
        """Replace components of the pipeline."""
        self.pipe.register_modules(**modules)

    def _save(self, folder: str) -> None:
        """Write the pipeline."""
        self.pipe.save_pretrained(folder)

    # ---- LoRA -------------------------------------------------------------------------------------------------------

    def add_lora(
        self,
        rank: int,
        alpha: float,
        targets: tuple[str, ...] | None = None,
        seed: int = 0,
        init: Literal["kaiming", "gaussian"] = "kaiming",
    ) -> None:
        """Inject trainable LoRA layers into every Linear of the denoisers whose name ends in one of `targets`.

        A is Kaiming-uniform (peft's default) or N(0, 1 / rank²) (peft's "gaussian"), drawn from `seed`; B is 0, so
        outputs do not change. Raises ValueError for a target that matches no module.
        """
        from peft import LoraConfig

        chosen = self.lora_targets if targets is None else targets
        for number, module in enumerate(self.modules().values()):
            layers = _check_targets(module, chosen)
            if targets is None and self.lora_within:
                chosen = tuple(name for name in layers if name.startswith(self.lora_within))
            _inject(module, LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(chosen)))
            self._lora_layers = []
            generator = torch.Generator().manual_seed(seed + number)
            for name, parameter in module.named_parameters():
                if ".lora_A." in name:
                    start = torch.empty(parameter.shape)
                    if init == "gaussian":
                        nn.init.normal_(start, std=1.0 / rank, generator=generator)
                    else:
                        nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
                    parameter.data.copy_(start)

    def has_lora(self) -> bool:
        """Whether the denoisers have a LoRA."""
        return NAME in getattr(self.transformer, "peft_config", {})

    @property
    def lora_rank(self) -> int:
        """The LoRA's rank."""
        return self.transformer.peft_config[NAME].r  # type: ignore[union-attr,index]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, `velocity` is the reference policy's: the LoRA is disabled. Raises RuntimeError without a LoRA.

        The layers are switched directly: diffusers' `disable_adapters` walks over all modules, sets `requires_grad` of
        all weights and reads peft's metadata every time.
        """
        if not self.has_lora():
            raise RuntimeError("there is no reference policy: a KL term needs LoRA")
        if not self._lora_layers:
            self._lora_layers = _lora_layers(self.modules().values())
        for layer in self._lora_layers:
            layer._disable_adapters = True
        compiled = self.compiled  # no parameter trains here, so there is no training graph
        self.compiled = False
        try:
            yield
        finally:
            self.compiled = compiled
            for layer in self._lora_layers:
                layer._disable_adapters = False

    def save_lora(self, folder: str) -> None:
        """Write the LoRA in diffusers format, with alpha = rank, for `pipe.load_lora_weights(folder)`.

        B is multiplied by its layer's scale and rounded to fp32, exactly if the scale is a power of two. A second
        expert's LoRA goes into a subfolder of its name: `load_lora_weights(f"{folder}/transformer_2",
        load_into_transformer_2=True)`.
        """
        from peft import get_peft_model_state_dict

        modules: dict[str, Any] = self.modules()
        for name, module in modules.items():
            config = module.peft_config[NAME]
            facts = {  # options that every version of peft knows
                "r": config.r, "lora_alpha": config.r, "rank_pattern": config.rank_pattern,
                "alpha_pattern": config.rank_pattern, "target_modules": sorted(config.target_modules),
            }  # fmt: skip
            layers = get_peft_model_state_dict(module, adapter_name=NAME)
            for key in (key for key in layers if ".lora_B." in key):
                layers[key] = layers[key] * module.get_submodule(key.partition(".lora_B.")[0]).scaling[NAME]
            self._lora_files().save_lora_weights(
                folder if name == self.denoisers[0] else f"{folder}/{name}",
                transformer_lora_layers=layers,
                transformer_lora_adapter_metadata=facts,
            )

    def load_lora(self, place: str) -> None:
        """Inject the LoRA of a file, or of a folder that `save_lora` or peft wrote, as strong as in the stock pipeline.

        Raises FileNotFoundError, or ValueError for a file that cannot be read as a whole.
        """
        from peft import set_peft_model_state_dict

        for name, module in self.modules().items():
            folder = Path(place) if name == self.denoisers[0] else Path(place, name)
            state, config = lora_files.read(folder, self._lora_files(), module)
            _inject(module, config)
            self._lora_layers = []
            count = sum(".lora_" in key for key, _ in module.named_parameters())
            result = set_peft_model_state_dict(module, state, adapter_name=NAME)
            if result.unexpected_keys or count != len(state):
                differ = f"the model's LoRA has {count}: their targets differ"
                raise ValueError(f"{folder} has {len(state)} tensors, but {differ}")

    def _lora_files(self) -> Any:
        """Reads and writes LoRA files: the pipeline, or HunyuanVideo's mixin for 1.5, whose pipeline cannot up to
        diffusers 0.42.1. Can go when it does."""
        from diffusers.loaders import HunyuanVideoLoraLoaderMixin

        return self.pipe if hasattr(self.pipe, "save_lora_weights") else HunyuanVideoLoraLoaderMixin


def locate_lora(source: str, experts: Sequence[str] = ()) -> Path:
    """Folder or file of a LoRA: a path, a run's folder, or a hub id, 'owner/name' or 'owner/name/FILE.safetensors',
    also with '@revision', downloaded unless cached.

    experts: names of the denoisers after the first, whose files are in subfolders. Raises FileNotFoundError, or OSError
    if the hub does not answer.
    """
    from huggingface_hub import snapshot_download

    path = Path(source).expanduser()
    if path.exists():
        return path / "lora" if (path / "lora").is_dir() else path
    found = HUB_LORA.fullmatch(source)
    if found is None or Path(source.split("/")[0]).is_dir():
        expected = "a folder, a file or a hub id 'owner/name' or 'owner/name/FILE.safetensors'"
        raise FileNotFoundError(f"expected {expected}, got '{source}'")
    name, file, revision = found.groups()
    if file:
        wanted = [file, str(Path(file).with_name(lora_files.CONFIG))]
    else:
        places = ["", *(f"{expert}/" for expert in experts)]
        wanted = [place + name for place in places for name in lora_files.NAMES]
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=[glob.escape(each) for each in wanted]))
    if not any((folder / each).is_file() for each in wanted if each.endswith(".safetensors")):
        raise FileNotFoundError(f"'{source}' has no {file or ' or '.join(wanted[:2])}{_other_files(name, revision)}")
    return folder / file if file else folder


def _other_files(name: str, revision: str | None) -> str:
    """In words, the safetensors files of a hub repository."""
    from huggingface_hub import list_repo_files

    files = [file for file in list_repo_files(name, revision=revision) if file.endswith(".safetensors")]
    return f"; it has {', '.join(f'{name}/{file}' for file in files)}" if files else ""


def _check_targets(module: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Names of the Linear layers that end in one of `targets`. Raises ValueError for a target that matches none."""
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    unknown = [t for t in targets if not any(name == t or name.endswith("." + t) for name in linear)]
    if unknown or not targets:
        layers = sorted({re.sub(r"^\w+\.\d+\.", "", name) for name in linear})
        raise ValueError(f"LoRA targets {unknown} match no Linear layer of the transformer; it has {', '.join(layers)}")
    return [name for name in linear if f".{name}".endswith(tuple(f".{target}" for target in targets))]


def _lora_layers(denoisers: Iterable[nn.Module]) -> list[Any]:
    """The layers of peft in denoisers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for denoiser in denoisers for layer in denoiser.modules() if isinstance(layer, BaseTunerLayer)]


def _inject(module: Any, config: Any) -> None:
    """Inject `config`, with trained weights in fp32; the random state of the process is preserved."""
    from prefgrpo.models.lora import fuse_lora

    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        module.add_adapter(config, adapter_name=NAME)
    fuse_lora(module)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()

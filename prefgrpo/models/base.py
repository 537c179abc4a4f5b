"""The interface between shared code and a model family; one file per family implements it.

An adapter owns a stock diffusers pipeline and knows its conventions: conditioning, time, guidance, packing. It knows
nothing about step rules, noise, rewards or training, and holds no sampling state: size, frames and guidance are passed
with every call. Invariant: for the same (x, σ, condition, batch shape) and weights, `velocity` is bitwise the same in
rollout and in replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from prefgrpo.config.schema import SamplingConfig as Sampling
from prefgrpo.models import folder as folders
from prefgrpo.models.condition import Condition, combine
from prefgrpo.models.guidance import Cfg, Gradient
from prefgrpo.models.stock_sampling import StockSampling
from prefgrpo.models.vae import decode_image, encode
from prefgrpo.models.weights import Weights

__all__ = ["Adapter", "Condition", "Masks", "Sampling"]

Masks = Literal["none", "padding", "always", "own"]


class Adapter(StockSampling, Weights, ABC):
    """A loaded model family."""

    default_guidance_2: ClassVar[float | None] = None
    """Guidance scale of the second expert; None: the family has one denoiser."""
    cfg: ClassVar[Cfg | None] = None
    """Form of classifier-free guidance; None: the family has none (guidance is embedded, or absent)."""
    packed: ClassVar[bool] = False
    """Whether the latents of the denoising loop are packed 2×2 into tokens, [L, 4C]."""
    most_sources: ClassVar[int] = 0
    """Maximum number of source images per prompt (editing families)."""
    needs_source: ClassVar[bool] = False
    """Whether every prompt must have a source image."""
    default_source_area: ClassVar[int | None] = None
    """Number of pixels to which the stock pipeline resizes source images; None: it does not resize them."""
    not_read: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of components that are not loaded, as neither sampling nor training needs them."""
    parts_in_fp32: ClassVar[tuple[str, ...]] = ()
    """Components of the pipeline that run in fp32, as in the published use of a bf16 denoiser."""
    attention_masks: ClassVar[Masks] = "none"
    """When the blocks' attention masks text. "none": never, as all texts have one length. Otherwise embeddings are as
    long as their prompt, and a batch has one prompt; they are masked if context parallelism pads them ("padding"), or
    "always". "own": blocks choose masks and kernels themselves."""
    context_parallel: ClassVar[str] = ""
    """Context parallelism that training supports: "" for none, "ulysses", or "ring" for both."""
    text_sees_sources: ClassVar[bool] = False
    """Whether the text encoder sees the source images: a prompt then has one embedding per source."""

    with_sound: ClassVar[bool] = False
    """Whether a sample's latents include the clip's sound, which pairs from files do not have."""

    text_multiple = 1
    """Texts are padded to a multiple of this many tokens, which context parallelism divides."""

    def __init__(
        self,
        pipe: Any,
        *,
        source_area: int | None = None,
        guidance_gradient: Gradient = "both",
    ) -> None:
        """Wrap a loaded pipeline.

        source_area: number of pixels to which source images are resized, by families that resize them (default: as the
        stock pipeline does). guidance_gradient: which predictions of a guidance pair receive a gradient. Raises
        `folder.ModelError` for a pipeline with a guider that does more than guidance at every step.
        """
        guider = getattr(pipe, "guider", None)
        departures = self.cfg.departures(guider) if self.cfg and guider else []
        if departures:
            expected = "expected ClassifierFreeGuidance at every step, whose scale is rollout.guidance"
            raise folders.ModelError(f"the pipeline's guider has {', '.join(departures)}: {expected}")
        self.pipe = pipe
        self.transformer = getattr(pipe, self.denoisers[0])
        self.guidance_gradient = guidance_gradient
        self.source_area = self.default_source_area if source_area is None else source_area
        self.dtype: torch.dtype = self.transformer.dtype  # type: ignore[assignment]
        """Dtype of the denoiser's inputs and, except for modules that diffusers keeps in fp32, of its weights."""
        self.device: torch.device = next(self.transformer.parameters()).device
        """Device on which the denoisers run; weights may be stored elsewhere."""

    @classmethod
    @folders.quiet()
    def load(
        cls,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        *,
        encoders: bool = True,
        mapped: bool = False,
        offload: tuple[str, ...] = (),
        **options: Any,
    ) -> Adapter:
        """Load from a folder or hub id, frozen, in eval mode; the arguments are those of `read`, options those of
        `__init__`. Raises `folder.ModelError` for a missing folder or one that holds another kind of pipeline."""
        adapter = cls(cls.read(cls.find(model), dtype, device, encoders, mapped, offload), **options)
        adapter.dtype = dtype
        adapter.device = device
        return adapter

    @classmethod
    def read(
        cls,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        encoders: bool,
        mapped: bool,
        offload: tuple[str, ...],
    ) -> Any:
        """The stock pipeline in a folder, frozen, in eval mode.

        encoders: False skips the text encoders (every prompt must then be in the cache). mapped: leave the denoisers in
        the mapped files, in the files' dtype (a cast would be a copy), to be sharded from there. offload: kinds of
        parts (text_encoder, vae) that stay in CPU memory, as mapped files, while they are not used. Mapped files are
        shared by the processes of a machine; everything else goes to the device tensor by tensor, without a second copy
        in CPU memory.
        """
        index = folders.components_of(path)
        skipped = cls.not_read if encoders else (*cls.not_read, *folders.ENCODERS)
        left_out = [name for name, part in index.items() if part == [None, None] or name.startswith(skipped)]
        read = [name for name in index if name not in left_out]
        in_files = cls.denoisers if mapped else ()
        dtypes = {"default": dtype} | dict.fromkeys(cls.parts_in_fp32, torch.float32)
        dtypes |= {name: folders.stored_dtype(path / name) or dtype for name in in_files}
        variant = folders.check_weights(path, read)
        if encoders:
            folders.check_tokenizers(path, read)
        pipe = cls.open_pipeline(path, dict.fromkeys(left_out), dtype=dtypes, variant=variant)
        pipe.set_progress_bar_config(disable=True)
        modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
        left_there = {*in_files, *(folders.named(modules, offload) if device.type != "cpu" else ())}
        for name, module in modules.items():
            module.eval().requires_grad_(False)
            for tensor in [*module.parameters(), *module.buffers()] if name not in left_there else ():
                tensor.data = tensor.data.to(device, copy=True)
        return pipe

    @classmethod
    @folders.quiet()
    def outline(cls, path: Path) -> Adapter:
        """The adapter of a pipeline in a folder, from its JSON files alone, without text encoders; modules are on
        torch's meta device. It knows sizes and schedules. Raises `folder.ModelError` for a part that diffusers rejects.
        """
        parts: dict[str, Any] = {}
        for name, (library, kind) in folders.components_of(path).items():
            if library == "diffusers" and kind is not None:
                parts[name] = folders.without_weights(path / name, kind)
            elif name.startswith((*cls.not_read, *folders.ENCODERS)) or any((path / name).glob("*.safetensors")):
                parts[name] = None
        return cls(cls.open_pipeline(path, parts))

    @classmethod
    def open_pipeline(cls, path: Path, parts: dict[str, Any], **options: Any) -> Any:
        """The stock pipeline in a folder, with `parts` (None: absent) in place of components of the folder.

        options: dtype (by component, and "default") and variant of the others.
        """
        import diffusers

        return getattr(diffusers, cls.pipeline).from_pretrained(path, **options, **parts)

    @classmethod
    def find(cls, model: str) -> Path:
        """`folder.locate` for this family. Raises ModelError for another family's model, even of the same pipeline."""
        path = folders.locate(model, not_read=cls.not_read)
        folders.check_denoisers(path, cls.denoisers)
        if difference := cls.unsupported_index(folders.index_of(path)):
            from prefgrpo.models import family_of  # imports this module

            raise folders.ModelError(f"'{path}' {difference}: expected family: {family_of(str(path))}")
        return path

    @classmethod
    def unsupported_index(cls, index: dict[str, Any]) -> str:
        """How a model_index.json differs from this family; empty if it belongs to the family."""
        if index.get("_class_name") != cls.pipeline:
            return f"contains a {index.get('_class_name')}, expected a {cls.pipeline}"
        nets = [name for name in index if name.startswith(cls.denoisers[0]) and index[name][0] is not None]
        return "" if set(nets) == set(cls.denoisers) else f"has {nets}, {cls.__name__} has {list(cls.denoisers)}"

    # ---- what a family implements -------------------------------------------------------------------------------

    @abstractmethod
    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """Unbatched condition of one prompt, from the pipeline's own text encoders."""

    def encode_edit(self, prompt: str, max_length: int, sources: tuple[Image.Image, ...]) -> Condition:
        """`encode_prompt` for families whose text encoder sees the source images."""
        return self.encode_prompt(prompt, max_length)

    def encode_source(self, source: Image.Image) -> Tensor:
        """Latents [rows, columns, C] of a source image, one token per position. TypeError if the family takes none."""
        raise TypeError(f"{type(self).__name__} takes no source images")

    def source_tensors(self, sources: tuple[Image.Image, ...], frames: int | None) -> list[Tensor]:
        """The denoiser's inputs for the source images: the latents of each."""
        return [self.encode_source(image) for image in sources]

    def latent_shape(self, sampling: Sampling) -> tuple[int, ...]:
        """Shape of one sample's latents, like the stock pipeline's `latents`; ValueError for an unsupported size.

        For an image: [C, height / 8, width / 8] where the VAE's scale is 8, or packed [L, 4C].
        """
        config: Any = self.transformer.config
        rows, columns = self.grid(sampling)
        if self.packed:
            return rows * columns, config.in_channels
        scale = self.pipe.vae_scale_factor
        return config.in_channels, sampling.height // scale, sampling.width // scale

    def final(self, x: Tensor, condition: Condition) -> Tensor:
        """Latents after the last step, with parts that the condition fixes put back in place."""
        return x

    def expert(self, sigma: Tensor, sampling: Sampling) -> tuple[str, float]:
        """(denoiser, guidance scale) for a batch at σ [B], preferably on the host."""
        return self.denoisers[0], sampling.guidance

    @abstractmethod
    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """One denoiser forward: velocity [B, …] at x [B, …] and σ [B] fp32, before classifier-free guidance.

        x and the condition have the adapter's dtype; timestep and guidance get the dtype that the stock pipeline gives
        them: nothing else casts.
        """

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Images [B, 3, H, W], or clips [B, F, 3, H, W], fp32 in [0, 1] from final latents.

        Here for images: undo the VAE's scale and shift of latents [B, C, h, w], then decode.
        """
        config = self.pipe.vae.config
        return decode_image(self.pipe, latents / config.scaling_factor + config.shift_factor)

    def latents_of(self, pixels: Tensor) -> Tensor:
        """The inverse of `decode`: latents [B, …] such as sampling ends with, from pixels in −1 … 1, images [B, 3, H,
        W] or clips [B, 3, F, H, W]; in the VAE's dtype. Here for images."""
        config = self.pipe.vae.config
        return (encode(self.pipe.vae, pixels) - config.shift_factor) * config.scaling_factor

    def dispatch_attention(self) -> None:
        """Make the blocks' attention use diffusers' dispatcher, for families whose stock processor does not."""

    # ---- shared by all families ---------------------------------------------------------------------------------

    def guided(self, sampling: Sampling) -> bool:
        """Whether a forward needs the negative prompt too."""
        return self.cfg is not None and self.cfg.active(sampling.guidance)

    @torch.no_grad()
    def encode(self, prompt: str, max_length: int, sources: tuple[Image.Image, ...] = ()) -> Condition:
        """Unbatched embedding of a prompt (with its source images, if `text_sees_sources`), on the CPU.

        Prompts are encoded one at a time, so that an embedding never depends on the other prompts.
        """
        if all(part is None for name, part in self.pipe.components.items() if name.startswith("text_encoder")):
            message = "a prompt is not in the embedding cache, and the text encoders were not loaded"
            raise folders.ModelError(f"{message}: run `prefgrpo preprocess` again (delete shards reported as damaged)")
        return self.encode_edit(prompt, max_length, sources).map(lambda tensor: tensor.detach().cpu().contiguous())

    @torch.no_grad()
    def encode_sources(self, sources: tuple[Image.Image, ...], frames: int | None = None) -> tuple[Tensor, ...]:
        """`Condition.sources` for the source images of an edit, on the CPU; frames: length of the generated clip."""
        return tuple(tensor.detach().cpu().contiguous() for tensor in self.source_tensors(sources, frames))

    @torch.no_grad()
    def encode_media(self, media: NDArray[np.uint8]) -> Tensor:
        """Latents of an image [H, W, 3], or of a clip [F, H, W, 3], as one sample of a rollout has them, on the CPU."""
        pixels = torch.from_numpy(media).movedim(-1, 0)[None].float() / 255 * 2 - 1
        if self.default_frames is not None and media.ndim == 3:
            pixels = pixels.unsqueeze(2)
        return self.latents_of(pixels)[0].cpu().contiguous()

    @contextmanager
    def on_device(self, *kinds: str) -> Iterator[None]:
        """Inside, parts of these kinds (text_encoder, vae) are on the device; afterwards, those that were offloaded
        point at their data in CPU memory again, which has not changed and is not copied back."""
        modules = [self.pipe.components[name] for name in folders.named(self.pipe.components, kinds)]
        tensors = [t for part in modules if part is not None for t in [*part.parameters(), *part.buffers()]]
        stored = [(tensor, tensor.data) for tensor in tensors if tensor.device != self.device]
        for tensor, data in stored:
            tensor.data = data.to(self.device)
        try:
            yield
        finally:
            for tensor, data in stored:
                tensor.data = data

    def velocity(self, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Guided velocity v [B, …] at latents x [B, …] of any dtype and σ [B] fp32, for a batched condition.

        Keep sigma on the host if possible: families with several experts select one by it.
        """
        if self.compiled and not torch.is_grad_enabled():  # use the training graph, see `compiled`
            with torch.enable_grad():
                return self.velocity(x, sigma, condition, sampling).detach()
        c, u = self.predictions(x, sigma, condition, sampling)
        if u is None or self.cfg is None:
            return c
        return self.cfg.combine(c, u, self.expert(sigma, sampling)[1])

    def published_velocity(self, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """The velocity of the stock call with its defaults, for evaluation and `generate`, without a gradient. Equals
        `velocity` for every family without a `stock_sampler`."""
        return self.velocity(x, sigma, condition, sampling)

    def predictions(
        self, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling
    ) -> tuple[Tensor, Tensor | None]:
        """Velocities (c, u) for the prompt and, if guidance is on, for the negative prompt, in the denoiser's dtype.

        A pair is one forward with batch size 2B in families whose texts all have one length, else two, whatever the
        lengths: with sharded weights all processes must run the same number. guidance_gradient 'conditional': u has a
        forward of its own without a graph, in rollout and replay alike. ValueError for a condition encoded with
        guidance off.
        """
        name, _ = self.expert(sigma, sampling)
        predict: Any = partial(self.predict, getattr(self.pipe, name), sampling=sampling)
        sigma = sigma.to(x.device, non_blocking=True)
        x = x.to(self.dtype)
        condition = condition.cast(self.dtype)
        if not self.guided(sampling):
            return predict(x, sigma, condition), None
        if condition.negative is None:
            raise ValueError("guidance is on, but the condition has no negative prompt: encode it with guidance on")
        positive = replace(condition, negative=None)
        negative = replace(condition.negative, sources=condition.sources)
        if self.guidance_gradient == "conditional":
            with torch.no_grad():
                u = predict(x, sigma, negative)
            return predict(x, sigma, positive), u
        if self.attention_masks != "none":
            return predict(x, sigma, positive), predict(x, sigma, negative)
        pair = combine([positive, negative], lambda _, tensors: torch.cat(tensors))
        c, u = predict(torch.cat([x, x]), torch.cat([sigma, sigma]), pair).chunk(2)
        return c, u

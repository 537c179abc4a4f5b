"""The interface between shared code and a model family; one file per family implements it.

An adapter owns a stock diffusers pipeline and knows its conventions: conditioning, time, guidance, packing. It knows
nothing of step rules, noise, rewards or training, and holds no sampling state: size, frames and guidance are passed
with every call. Invariant: for the same (x, σ, condition, batch shape) and weights, `velocity` is bitwise the same in
rollout and in replay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from prefgrpo.config.schema import SamplingConfig as Sampling
from prefgrpo.models import folder as folders
from prefgrpo.models import guidance as guiding
from prefgrpo.models.condition import Condition
from prefgrpo.models.offload import ComponentOffload
from prefgrpo.models.weights import Weights

__all__ = ["Adapter", "Condition", "Masks", "Sampling", "text_mask"]


Masks = Literal["none", "padding", "always", "own"]


def text_mask(condition: Condition, multiple: int = 1, second: bool = False) -> Tensor:
    """Padding mask bool [B, longest], on the CPU: True where a batch's `prompt_embeds` hold a token of the prompt.

    multiple: round the length up to a multiple of this. second: the mask for `prompt_embeds_2`.
    """
    lengths = condition.text_length_2 if second else condition.text_length
    assert lengths is not None
    longest = -(-int(lengths.max()) // multiple) * multiple
    return torch.arange(longest)[None, :] < lengths[:, None]


class Adapter(Weights, ABC):
    """A loaded model family."""

    pipeline: ClassVar[str]
    """Name of the stock diffusers pipeline class."""
    default_frames: ClassVar[int | None] = None
    """Frames per clip of the published model; None: it makes images."""
    default_guidance_2: ClassVar[float | None] = None
    """Guidance scale of the second expert; None: the family has one denoiser."""
    cfg: ClassVar[guiding.Cfg | None] = None
    """Form of classifier-free guidance; None: the family has none (guidance is embedded, or absent)."""
    own_lengths: ClassVar[bool] = False
    """Whether embeddings are as long as their prompts (`text_length`) instead of padded to a fixed length."""
    packed: ClassVar[bool] = False
    """Whether the latents of the denoising loop are packed 2×2 into tokens, [L, 4C]."""
    most_sources: ClassVar[int] = 0
    """Maximum number of source images per prompt (editing families)."""
    needs_source: ClassVar[bool] = False
    """Whether every prompt must have a source image."""
    default_source_area: ClassVar[int | None] = None
    """Number of pixels to which the stock pipeline resizes source images; None: it does not resize them."""
    source_spans_clip: ClassVar[bool] = False
    """Whether the latents of a source depend on the number of frames."""
    parts_in_fp32: ClassVar[tuple[str, ...]] = ()
    """Components of the pipeline that run in fp32, as in the published use of a bf16 denoiser."""
    attention_masks: ClassVar[Masks] = "none"
    """When the blocks' attention masks padded text: never, in batches of texts of different lengths, or always; "own":
    blocks choose masks and kernels themselves."""
    context_parallel: ClassVar[str] = ""
    """Context parallelism that training supports: "" for none, "ulysses", or "ring" for both."""
    text_sees_sources: ClassVar[bool] = False
    """Whether the text encoder sees the source images: a prompt then has one embedding per source."""

    def __init__(
        self,
        pipe: Any,
        *,
        target_components: tuple[str, ...] = (),
        source_area: int | None = None,
        guidance_gradient: guiding.Gradient = "both",
        fingerprint: str = "",
    ) -> None:
        """Wrap a loaded pipeline.

        target_components: denoisers to train (default: all). source_area: number of pixels to which source images are
        resized (for editing families that resize them; default: as the stock pipeline does). guidance_gradient: which
        predictions of a guidance pair receive a gradient. fingerprint: identifies the encoders that make conditions
        (`folder.encoder_fingerprint`).
        """
        if source_area is not None and self.default_source_area is None:
            raise ValueError(
                f"{type(self).__name__} does not resize source images: expected no `source_area`, got {source_area}"
            )
        if source_area is not None and source_area < 32 * 32:
            raise ValueError(f"source_area: expected at least {32 * 32} pixels, got {source_area}")
        if unknown := [name for name in target_components if name not in self.denoisers]:
            raise ValueError(f"target_components: expected some of {', '.join(self.denoisers)}, got {unknown}")
        from prefgrpo.integrations.rotary import fuse_rotary

        fuse_rotary()
        self.pipe, self.transformer = pipe, getattr(pipe, self.denoisers[0])
        self.trained = tuple(name for name in self.denoisers if name in (target_components or self.denoisers))
        self.fingerprint, self.guidance_gradient = fingerprint, guidance_gradient
        self.source_area = self.default_source_area if source_area is None else source_area
        self.dtype: torch.dtype = self.transformer.dtype  # type: ignore[assignment]
        """Dtype of the denoiser's inputs and, except for modules that diffusers keeps in fp32, of its weights."""
        self.home: torch.device | None = None
        """Device on which the denoisers run, if their weights may be stored elsewhere."""
        self.splits_lengths = False
        """Whether prompts of different lengths run in separate forwards, because attention takes no mask."""
        self.equal_forwards = False
        """Whether all processes must run equally many forwards, because weights are sharded."""
        self.text_multiple = 1
        """Batches of prompts of different lengths are padded to a multiple of this many tokens."""
        self.offload = ComponentOffload({}, (), torch.device("cpu"))
        """Components offloaded to CPU memory; none before `enable_offload`."""

    @classmethod
    def load(
        cls,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        *,
        encoders: bool = True,
        mapped: bool = False,
        **options: Any,
    ) -> Adapter:
        """Load from a folder or hub id, frozen, in eval mode, with aligned parameters (copied out of the mapped files).

        options: passed to `__init__`. encoders: False skips the text encoders (every prompt must then be in the cache).
        mapped: leave the denoisers in the mapped files, to be sharded from there.
        Raises `folder.ModelError` for a missing folder or one that holds another kind of pipeline.
        """
        path = cls.find(model)
        pipe = folders.read(
            path, cls.pipeline, dtype, device, encoders, cls.denoisers if mapped else (), cls.parts_in_fp32
        )
        return cls(pipe, fingerprint=folders.encoder_fingerprint(path), **options)

    @classmethod
    def find(cls, model: str) -> Path:
        """`folder.resolve` for this family. Raises ModelError for another family's model, even of the same pipeline."""
        path = folders.resolve(model, cls.pipeline)
        if odd := cls.unsupported_index(folders.index_of(path)):
            raise folders.ModelError(f"'{path}' {odd}: set `family` to this model's family")
        return path

    @classmethod
    def unsupported_index(cls, index: dict[str, Any]) -> str:
        """How a model_index.json of this pipeline class differs from this family; empty if it belongs to the family."""
        there = [name for name in index if name.startswith(cls.denoisers[0]) and index[name][0] is not None]
        return "" if set(there) == set(cls.denoisers) else f"has {there}, {cls.__name__} has {list(cls.denoisers)}"

    @property
    def device(self) -> torch.device:
        """Device on which the transformer runs."""
        return self.home or next(self.transformer.parameters()).device

    @property
    def unit(self) -> int:
        """Side of one token in pixels; image sides are multiples of it."""
        return 2 * self.pipe.vae_scale_factor

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

    def trains(self, sigma: float) -> bool:
        """Whether a step at this σ uses a denoiser that is trained."""
        return True

    @abstractmethod
    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """One denoiser forward: velocity [B, …] at x [B, …] and σ [B] fp32, before classifier-free guidance.

        x and the condition have the adapter's dtype; timestep and guidance get the dtype that the stock pipeline gives
        them, since casting is left to nothing else (there is no autocast).
        """

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Images [B, 3, H, W], or clips [B, F, 3, H, W], fp32 in [0, 1] from final latents.

        Here for images: undo the VAE's scale and shift of latents [B, C, h, w], then decode.
        """
        config = self.pipe.vae.config
        return self.decode_image(latents / config.scaling_factor + config.shift_factor)

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """Arguments that the stock pipeline passes to `set_timesteps`, besides the number of steps and the device.

        mu only matters if the scheduler shifts dynamically.
        """
        steps = sampling.steps
        flux = self.pipeline in ("FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline")
        own = flux and self.pipe.scheduler.config.get("use_flow_sigmas")
        even = {} if own else {"sigmas": np.linspace(1.0, 1.0 / steps, steps)}
        return even | {"mu": self.mu(sampling)}

    # ---- shared by all families ---------------------------------------------------------------------------------

    def frames(self, sampling: Sampling) -> int | None:
        """Frames per clip; None for images."""
        return self.default_frames if sampling.frames is None else sampling.frames

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
        if not self.most_sources:
            raise ValueError(
                f"{type(self).__name__} takes no source image; expected an editing family such as flux_kontext"
            )
        if len(sources) > self.most_sources:
            raise ValueError(f"{type(self).__name__} takes {self.most_sources} source image(s), got {len(sources)}")
        return tuple(tensor.detach().cpu().contiguous() for tensor in self.source_tensors(sources, frames))

    def stock_scheduler(self) -> Any:
        """A fresh, deterministic copy of the pipeline's scheduler. ValueError if it is no flow-matching scheduler."""
        scheduler = self.pipe.scheduler
        if "shift" not in scheduler.config and not scheduler.config.get("use_flow_sigmas"):
            raise ValueError(
                f"{type(scheduler).__name__} is not a flow-matching scheduler: expected "
                "FlowMatchEulerDiscreteScheduler, or a solver with use_flow_sigmas"
            )
        still = {"stochastic_sampling": False} if "stochastic_sampling" in scheduler.config else {}
        return type(scheduler).from_config(scheduler.config, **still)

    def timed_scheduler(self, sampling: Sampling) -> Any:
        """`stock_scheduler` after `set_timesteps`, called as the stock pipeline does for this size."""
        scheduler, options = self.stock_scheduler(), self.schedule_options(sampling)
        try:
            scheduler.set_timesteps(num_inference_steps=sampling.steps, device="cpu", **options)
        except (TypeError, AssertionError) as error:
            raise ValueError(
                f"{type(scheduler).__name__} does not take what {self.pipeline} passes it ({', '.join(options)}): "
                "expected FlowMatchEulerDiscreteScheduler"
            ) from error
        return scheduler

    def sigmas(self, sampling: Sampling) -> Tensor:
        """[steps + 1] fp32 sigmas of the stock pipeline's own scheduler for this size.

        Heun's scheduler repeats each, and here they are merged. For other schedulers duplicates stay, so that
        `make_schedule` rejects them: merging would silently sample with fewer steps than requested.
        """
        scheduler = self.timed_scheduler(sampling)
        sigmas = scheduler.sigmas.to(torch.float32)
        return sigmas.unique_consecutive() if scheduler.order > 1 else sigmas

    def times(self, sampling: Sampling) -> Tensor:
        """[steps] fp32, the stock pipeline's timesteps / 1000: σ, or whole thousandths if the solver rounds them."""
        timesteps = self.timed_scheduler(sampling).timesteps
        return self.sigmas(sampling)[:-1] if timesteps.is_floating_point() else timesteps.float() / 1000

    def velocity(self, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Guided velocity v [B, …] at latents x [B, …] of any dtype and σ [B] fp32, for a batched condition.

        Keep sigma on the host if possible: families with several experts select one by it.
        """
        if self.compiled and not torch.is_grad_enabled():  # use the training graph; see `compile_blocks`
            with torch.enable_grad():
                return self.velocity(x, sigma, condition, sampling).detach()
        if self.cfg is not None and self.guided(sampling):
            c, u = self.cond_uncond(x, sigma, condition, sampling)
            return self.cfg.combine(c, u, self.expert(sigma, sampling)[1])
        net = getattr(self.pipe, self.expert(sigma, sampling)[0])
        sigma = sigma.to(x.device, non_blocking=True)
        return self._predict(net, x.to(self.dtype), sigma, condition.cast(self.dtype), sampling)

    def cond_uncond(self, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """(c, u) of a guided step."""
        name, _ = self.expert(sigma, sampling)
        predict: Callable[..., Tensor] = partial(self._predict, getattr(self.pipe, name), sampling=sampling)
        sigma = sigma.to(x.device, non_blocking=True)
        condition = condition.cast(self.dtype)
        return guiding.predict_cond_uncond(predict, x.to(self.dtype), sigma, condition, self.guidance_gradient)

    def _predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """`predict`, in one forward per length of prompt if `splits_lengths`."""
        lengths = condition.text_length
        if not self.splits_lengths or lengths is None:
            return self.predict(net, x, sigma, condition, sampling)
        if self.equal_forwards:
            parts = list(torch.arange(len(lengths)).split(1))
        else:
            parts = [(lengths == length).nonzero().flatten() for length in lengths.unique()]
        if len(parts) == 1:
            return self.predict(net, x, sigma, condition, sampling)
        v = []
        for rows in parts:
            there = rows.to(x.device, non_blocking=True)
            v.append(self.predict(net, x[there], sigma[there], condition.select(rows), sampling))
        order = torch.cat(parts).argsort().to(x.device, non_blocking=True)
        return torch.cat(v)[order]

    def dispatch_attention(self) -> None:
        """Make the blocks' attention use diffusers' dispatcher, for families whose stock processor does not."""

    def grid(self, sampling: Sampling) -> tuple[int, int]:
        """Rows and columns of tokens; ValueError for sides that are not multiples of `unit`."""
        height, width = sampling.height, sampling.width
        if height < self.unit or width < self.unit or height % self.unit or width % self.unit:
            raise ValueError(
                f"height and width must be multiples of {self.unit} for this model, got {height} × {width}"
            )
        return height // self.unit, width // self.unit

    def tokens(self, sampling: Sampling) -> int:
        """Number of tokens of a sample's latents (for some video families: of one latent frame)."""
        return math.prod(self.grid(sampling))

    def sequence(self, sampling: Sampling) -> int:
        """Number of tokens that context parallelism splits: those of all latent frames of a sample."""
        return self.tokens(sampling)

    def mu(self, sampling: Sampling) -> float:
        """The dynamic time shift: linear in the number of tokens, with the scheduler config's parameters."""
        get = self.pipe.scheduler.config.get
        low, high, base = get("base_image_seq_len", 256), get("max_image_seq_len", 4096), get("base_shift", 0.5)
        slope = (get("max_shift", 1.15) - base) / (high - low)
        return self.tokens(sampling) * slope + (base - slope * low)

    @torch.no_grad()
    def decode_image(self, grid: Tensor) -> Tensor:
        """Images [B, 3, H, W] fp32 in [0, 1] from unscaled VAE latents."""
        image = self.pipe.vae.decode(grid.to(self.pipe.vae.dtype), return_dict=False)[0]
        image = image[:, :, 0] if image.dim() == 5 else image  # video VAEs: a clip of one frame
        return self.pipe.image_processor.postprocess(image, output_type="pt").float()

    def vae_options(self, slicing: bool, tiling: bool) -> None:
        """Let the VAE process one image of a batch at a time, or tiles. ValueError if this VAE does not support it."""
        for asked, name in ((slicing, "enable_slicing"), (tiling, "enable_tiling")):
            if asked and not hasattr(self.pipe.vae, name):
                raise ValueError(f"{type(self.pipe.vae).__name__} has no {name}")
            if asked:
                getattr(self.pipe.vae, name)()

    def enable_offload(self, kinds: tuple[str, ...], device: torch.device) -> None:
        """Move the pipeline to `device`, but offload these kinds of parts (text_encoder, vae) to the CPU between uses.

        If `home` is set, denoisers stay where they are.
        """
        kept = self.denoisers if self.home else ()
        self.offload = ComponentOffload({n: p for n, p in self.pipe.components.items() if n not in kept}, kinds, device)

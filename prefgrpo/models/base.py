"""What the shared code needs from a model family; one file per family implements it.

An adapter owns a stock diffusers pipeline and knows its conventions: conditioning, time, guidance, packing. It
knows nothing of rules, noise, rewards or training, and holds no sampling state: size, frames and guidance come with
every call. Invariant: `velocity` at the same (x, σ, condition, batch shape) and the same weights returns the same bits
in rollout and in replay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from prefgrpo.config.schema import SamplingConfig as Sampling
from prefgrpo.models import folder as folders
from prefgrpo.models import guidance as guiding
from prefgrpo.models.cache import in_turn
from prefgrpo.models.condition import Condition
from prefgrpo.models.parking import Parked
from prefgrpo.models.weights import Weights
from prefgrpo.ops.args import Guidance
from prefgrpo.ops.reference import guided

__all__ = ["Adapter", "Condition", "Sampling", "after_guidance", "text_mask"]

TEXT_WIDTHS = (
    "joint_attention_dim", "text_dim", "cap_feat_dim", "caption_channels", "text_embed_dim", "context_in_dim",
    "cross_attention_dim",
)  # fmt: skip
"""Names of the width of the text's states in the configs of diffusers' denoisers; the first that is there counts."""


def after_guidance(c: Tensor, more: Guidance | None) -> Tensor:
    """The velocity of what `cond_uncond` returns."""
    return c if more is None else guided(c, more.uncond, more.scale, more.from_cond, more.rescale)


def text_mask(condition: Condition, multiple: int = 1, second: bool = False) -> Tensor:
    """bool [B, longest], on the CPU: which places of a batch's `prompt_embeds` hold a token of the prompt.

    multiple: of which the longest is made one, by places without a token. second: of its `prompt_embeds_2`.
    """
    lengths = condition.text_length_2 if second else condition.text_length
    assert lengths is not None
    places = lengths.new_ones(-(-int(lengths.max()) // multiple) * multiple).cumsum(0)
    return places[None, :] <= lengths[:, None]  # made of the lengths, whose content `plan` knows


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
    """Whether a prompt's embedding is as long as the prompt (`text_length`)."""
    packed: ClassVar[bool] = False
    """Whether the loop's latents are packed 2×2 into tokens, [L, 4C]."""
    most_sources: ClassVar[int] = 0
    """Source images that one prompt may have (editing families)."""
    needs_source: ClassVar[bool] = False
    """Whether a prompt must have one."""
    default_source_area: ClassVar[int | None] = None
    """Pixels that the stock pipeline resizes source images to; None: it does not."""
    source_spans_clip: ClassVar[bool] = False
    """Whether the latents of a source depend on the number of frames."""
    whole_times: ClassVar[bool] = False
    """Whether the model only knows whole times, so that there is nothing to truncate."""
    context_parallel: ClassVar[str] = ""
    """Context parallelism that its denoisers train under: none, "ulysses", or "ring" for both."""
    text_sees_sources: ClassVar[bool] = False
    """Whether the text encoder sees the source images: a prompt's embedding is then one per source."""

    def __init__(
        self,
        pipe: Any,
        *,
        target_components: tuple[str, ...] = (),
        source_area: int | None = None,
        guidance_gradient: guiding.Gradient = "both",
        fingerprint: str = "",
    ) -> None:
        """Adopt a loaded pipeline.

        target_components: which denoisers train (default: all). source_area: pixels that source images are resized to
        (editing families that resize them; default: as the stock pipeline does). guidance_gradient: through which
        predictions of a guidance pair the gradient flows. fingerprint: of what makes conditions
        (`folder.encoder_fingerprint`).
        """
        if source_area is not None and self.default_source_area is None:
            raise ValueError(f"{type(self).__name__} resizes no sources: expected no `source_area`, got {source_area}")
        if source_area is not None and source_area < 32 * 32:
            raise ValueError(f"source_area: expected at least {32 * 32} pixels, got {source_area}")
        if unknown := [name for name in target_components if name not in self.denoisers]:
            raise ValueError(f"target_components: expected some of {', '.join(self.denoisers)}, got {unknown}")
        self.pipe, self.transformer = pipe, getattr(pipe, self.denoisers[0])
        self.trained = tuple(name for name in self.denoisers if name in (target_components or self.denoisers))
        self.fingerprint, self.guidance_gradient = fingerprint, guidance_gradient
        self.source_area = self.default_source_area if source_area is None else source_area
        self.dtype: torch.dtype = self.transformer.dtype  # type: ignore[assignment]
        """Compute dtype; bf16 and fp16 run under autocast, so fp32 LoRA masters may sit on a bf16 base."""
        self.home: torch.device | None = None
        """Where the denoisers work, if their weights may wait elsewhere."""
        self.text_multiple = 1
        """Joined text of the prompts' own lengths is padded to a multiple of so many tokens."""
        self.parked = Parked({}, (), torch.device("cpu"))
        """What waits in the CPU's memory; nothing, until `park`."""

    @classmethod
    def load(
        cls, model: str, dtype: torch.dtype, device: torch.device, *, encoders: bool = True, **options: Any
    ) -> Adapter:
        """Load from a folder or hub id, frozen, in eval mode, parameters aligned (cloned out of mmap).

        options: its own. encoders: False leaves the text encoders on disk (every prompt must then be in the cache).
        Raises `folder.ModelError` for a missing folder or one that holds another kind of pipeline.
        """
        path = cls.find(model)
        pipe = folders.read(path, cls.pipeline, dtype, device, encoders)
        return cls(pipe, fingerprint=folders.encoder_fingerprint(path), **options)

    @classmethod
    def find(cls, model: str, configs_only: bool = False) -> Path:
        """`folder.resolve` of a model of this family: several share a pipeline. Raises ModelError for another's."""
        path = folders.resolve(model, cls.pipeline, configs_only)
        if odd := cls.unsupported_index(folders.index_of(path)):
            raise folders.ModelError(f"'{path}' {odd}: set `family` to the one of this model")
        return path

    @classmethod
    def unsupported_index(cls, index: dict[str, Any]) -> str:
        """What a model_index.json of this pipeline has that the family has not; empty: it is the family's."""
        there = [name for name in index if name.startswith(cls.denoisers[0]) and index[name][0] is not None]
        return "" if set(there) == set(cls.denoisers) else f"has {there}, {cls.__name__} has {list(cls.denoisers)}"

    @property
    def device(self) -> torch.device:
        """Where the transformer works."""
        return self.home or next(self.transformer.parameters()).device

    @property
    def unit(self) -> int:
        """Pixels per side of one token; image sides are multiples of it."""
        return 2 * self.pipe.vae_scale_factor

    # ---- what a family implements -------------------------------------------------------------------------------

    @abstractmethod
    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """Unbatched condition of one prompt through the pipeline's own text encoders."""

    def encode_edit(self, prompt: str, max_length: int, sources: tuple[Image.Image, ...]) -> Condition:
        """`encode_prompt` of a family whose text encoder sees the source images."""
        return self.encode_prompt(prompt, max_length)

    def encode_source(self, source: Image.Image) -> Tensor:
        """Latents [rows, columns, C] of a source image, one token per place. TypeError if the family takes none."""
        raise TypeError(f"{type(self).__name__} takes no source images")

    def source_tensors(self, sources: tuple[Image.Image, ...], frames: int | None) -> list[Tensor]:
        """What the denoiser is given of the source images: the latents of each."""
        return [self.encode_source(image) for image in sources]

    def latent_shape(self, sampling: Sampling) -> tuple[int, ...]:
        """Shape of one sample's latents, as the stock pipeline's `latents`; ValueError for a size that does not fit.

        Of an image: [C, height / 8, width / 8] where the VAE's scale is 8, or packed [L, 4C].
        """
        config: Any = self.transformer.config
        rows, columns = self.grid(sampling)
        if self.packed:
            return rows * columns, config.in_channels
        scale = self.pipe.vae_scale_factor
        return config.in_channels, sampling.height // scale, sampling.width // scale

    def prior(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Latents at the schedule's first σ (a scalar on the host) from unit noise x [B, …], as the stock `latents`."""
        return x

    def final(self, x: Tensor, condition: Condition) -> Tensor:
        """Latents after the last step, with what the condition gives as it is."""
        return x

    def expert(self, sigma: Tensor, sampling: Sampling) -> tuple[str, float]:
        """(denoiser, guidance scale) of a batch at σ [B], which is best on the host."""
        return self.denoisers[0], sampling.guidance

    def trains(self, sigma: float) -> bool:
        """Whether a step at this σ goes through a denoiser that trains."""
        return True

    @abstractmethod
    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """One forward of a denoiser: velocity [B, …] at x [B, …] fp32 and σ [B] fp32, without guidance by c and u."""

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Images [B, 3, H, W], or clips [B, F, 3, H, W], fp32 in [0, 1] from final latents.

        Of an image's latents [B, C, h, w]: undo the VAE's scale and shift, decode.
        """
        config = self.pipe.vae.config
        return self.decode_image(latents / config.scaling_factor + config.shift_factor)

    def condition_shapes(self, max_length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `encode_prompt` returns for a prompt of max_length tokens, for `prefgrpo plan`."""
        config: Any = self.transformer.config
        shapes: dict[str, tuple[int, ...]] = {
            "prompt_embeds": (max_length, next(config[key] for key in TEXT_WIDTHS if key in config))
        }
        if self.own_lengths:
            shapes["text_length"] = ()
        if "pooled_projection_dim" in config:
            shapes["pooled"] = (config.pooled_projection_dim,)
        return shapes

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """What the stock pipeline passes to its scheduler's `set_timesteps`, beside the number of steps and the device.

        mu only counts where the scheduler shifts dynamically.
        """
        steps = sampling.steps
        flux = self.pipeline in ("FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline")
        own = flux and self.pipe.scheduler.config.get("use_flow_sigmas")
        even = {} if own else {"sigmas": np.linspace(1.0, 1.0 / steps, steps)}
        return even | {"mu": self.mu(sampling)}

    def stock_call(self, prompts: list[str], max_length: int, sampling: Sampling) -> dict[str, Any]:
        """Arguments, beside latents, size and steps, with which the stock pipeline does what this adapter does."""
        call = {"prompt": prompts, "guidance_scale": sampling.guidance, "max_sequence_length": max_length}
        return call | ({} if self.default_frames is None else {"num_frames": self.frames(sampling)})

    def stock_edit(self, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        """(stock pipeline, further arguments of its call) of an edit; images go into `image`, one prompt per call."""
        return self.pipeline, {}

    # ---- shared by all families ---------------------------------------------------------------------------------

    def frames(self, sampling: Sampling) -> int | None:
        """Frames per clip; None for images."""
        return self.default_frames if sampling.frames is None else sampling.frames

    def guided(self, sampling: Sampling) -> bool:
        """Whether a forward needs the negative prompt too."""
        return self.cfg is not None and self.cfg.active(sampling.guidance)

    @torch.no_grad()
    def encode(self, prompt: str, max_length: int, sources: tuple[Image.Image, ...] = ()) -> Condition:
        """Unbatched embedding of a prompt (with the source images, if `text_sees_sources`), on the CPU.

        One at a time, so that a prompt's embedding never depends on its neighbours.
        """
        if all(part is None for name, part in self.pipe.components.items() if name.startswith("text_encoder")):
            message = "a text is not in the embedding cache, and the text encoders were left on disk"
            raise folders.ModelError(f"{message}: remove damaged shards, and run `prefgrpo preprocess` again")
        return self.encode_edit(prompt, max_length, sources).map(lambda tensor: tensor.detach().cpu().contiguous())

    @torch.no_grad()
    def encode_sources(self, sources: tuple[Image.Image, ...], frames: int | None = None) -> tuple[Tensor, ...]:
        """`Condition.sources` of the source images of an edit, on the CPU; frames: of the clip that is made of them."""
        if not self.most_sources:
            raise ValueError(
                f"{type(self).__name__} takes no source image; expected an editing family such as flux_kontext"
            )
        if len(sources) > self.most_sources:
            raise ValueError(f"{type(self).__name__} takes {self.most_sources} source image(s), got {len(sources)}")
        return tuple(tensor.detach().cpu().contiguous() for tensor in self.source_tensors(sources, frames))

    def stock_scheduler(self) -> Any:
        """A fresh copy of the pipeline's scheduler that adds no noise. ValueError unless it is one of a flow."""
        scheduler = self.pipe.scheduler
        if "shift" not in scheduler.config and not scheduler.config.get("use_flow_sigmas"):
            raise ValueError(
                f"{type(scheduler).__name__} is no scheduler of a flow: expected FlowMatchEulerDiscreteScheduler, or "
                "a solver with use_flow_sigmas"
            )
        still = {"stochastic_sampling": False} if "stochastic_sampling" in scheduler.config else {}
        return type(scheduler).from_config(scheduler.config, **still)

    def timed_scheduler(self, sampling: Sampling) -> Any:
        """`stock_scheduler` after the `set_timesteps` of the stock pipeline for this size."""
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

        Heun's scheduler has each twice. Elsewhere equal ones stay: `make_schedule` refuses them, and fewer steps than
        were asked for would go unnoticed.
        """
        scheduler = self.timed_scheduler(sampling)
        sigmas = scheduler.sigmas.to(torch.float32)
        return sigmas.unique_consecutive() if scheduler.order > 1 else sigmas

    def times(self, sampling: Sampling) -> Tensor:
        """[steps] fp32, timesteps / 1000 of the stock pipeline: σ, or whole thousandths where a solver rounds them."""
        timesteps = self.timed_scheduler(sampling).timesteps
        return self.sigmas(sampling)[:-1] if timesteps.is_floating_point() else timesteps.float() / 1000

    def velocity(self, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Model velocity v [B, …] at latents x [B, …] of any dtype, σ [B] fp32, for a batched condition."""
        return after_guidance(*self.cond_uncond(x, sigma, condition, sampling))

    def cond_uncond(
        self, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling
    ) -> tuple[Tensor, Guidance | None]:
        """(c, what guidance adds): the arguments v and guidance of `ops.affine_step` and `ops.affine_logp`.

        sigma is best on the host: a family of experts chooses by it.
        """
        name, scale = self.expert(sigma, sampling)
        denoiser = getattr(self.pipe, name)
        predict: Callable[..., Tensor] = partial(self.predict, denoiser, sampling=sampling)
        if getattr(denoiser, "is_cache_enabled", False):
            predict = in_turn(predict, denoiser)
        x, sigma, low = x.float(), sigma.to(x.device, non_blocking=True), self.dtype != torch.float32
        if self.compiled and not torch.is_grad_enabled():  # the graph of training; see `compile_blocks`
            with torch.enable_grad():
                c, more = self.cond_uncond(x, sigma, condition, sampling)
            return c.detach(), more if more is None else more._replace(uncond=more.uncond.detach())
        with torch.autocast(x.device.type, dtype=self.dtype if low else None, enabled=low):
            if self.cfg is None or not self.guided(sampling):
                return predict(x, sigma, condition), None
            c, u = guiding.both(predict, x, sigma, condition, self.guidance_gradient)
        return c, self.cfg.guidance_for(u, scale)

    def grid(self, sampling: Sampling) -> tuple[int, int]:
        """Rows and columns of tokens; ValueError for sides that are not multiples of `unit`."""
        height, width = sampling.height, sampling.width
        if height < self.unit or width < self.unit or height % self.unit or width % self.unit:
            raise ValueError(
                f"height and width must be multiples of {self.unit} for this model, got {height} × {width}"
            )
        return height // self.unit, width // self.unit

    def tokens(self, sampling: Sampling) -> int:
        """How many tokens the latents of a sample are."""
        return math.prod(self.grid(sampling))

    def sequence(self, sampling: Sampling) -> int:
        """Tokens of a sample that context parallelism divides: those of all latent frames."""
        return self.tokens(sampling)

    def mu(self, sampling: Sampling) -> float:
        """The dynamic time shift: linear in the number of tokens, as the scheduler's config says."""
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
        """Let the VAE work on one image of a batch at a time, or on tiles. ValueError if this VAE cannot."""
        for asked, name in ((slicing, "enable_slicing"), (tiling, "enable_tiling")):
            if asked and not hasattr(self.pipe.vae, name):
                raise ValueError(f"{type(self.pipe.vae).__name__} has no {name}")
            if asked:
                getattr(self.pipe.vae, name)()

    def park(self, kinds: tuple[str, ...], device: torch.device) -> None:
        """Move the pipeline to `device`, but for these kinds of parts (text_encoder, vae): they come to work only.

        Denoisers that have a `home` stay as they are.
        """
        there = self.denoisers if self.home else ()
        self.parked = Parked({n: part for n, part in self.pipe.components.items() if n not in there}, kinds, device)

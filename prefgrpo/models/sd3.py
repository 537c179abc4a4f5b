"""Stable Diffusion 3 and 3.5: latents [C, h, w], time = 1000σ, classifier-free guidance 4.5.

Conditions: CLIP-L, CLIP-G and T5 states in one sequence, and both pooled vectors. Invariant: with `ode` steps the
images are those of the stock StableDiffusion3Pipeline (without skip-layer guidance).
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.weights import JOINT_ATTENTION


class StableDiffusion3(Adapter):
    """SD3 / SD3.5 text-to-image."""

    pipeline = "StableDiffusion3Pipeline"
    cfg = Cfg()
    lora_targets = JOINT_ATTENTION

    @property
    def unit(self) -> int:
        """Pixels per side of one transformer patch: 16 for SD3.5."""
        return self.pipe.vae_scale_factor * self.pipe.patch_size

    @property
    def most_tokens(self) -> int:
        """The side of its table of positions."""
        config: Any = self.transformer.config
        return int(config.pos_embed_max_size)

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [77 + max_length, C] and pooled [C']; max_length: T5 tokens."""
        options = {"do_classifier_free_guidance": False, "max_sequence_length": max_length}
        embeds, _, pooled, _ = self.pipe.encode_prompt(prompt, prompt, prompt, device=self.device, **options)
        return Condition(embeds[0], pooled=pooled[0])

    def attention_tokens(self, sampling: Sampling, max_length: int) -> list[tuple[int, int]]:
        """Text (CLIP's 77 tokens, then T5's) and image together; in SD3.5-medium the image also alone."""
        image = self.tokens(sampling)
        both = image + 77 + max_length
        return [(both, both), (image, image)]

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """The scheduler's own sigmas; if it shifts dynamically, the shift for this image size."""
        dynamic = self.pipe.scheduler.config.get("use_dynamic_shifting")
        return {"mu": self.mu(sampling)} if dynamic else {}

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, h, w]."""
        return net(
            hidden_states=x,
            timestep=sigma * 1000,
            encoder_hidden_states=condition.prompt_embeds,
            pooled_projections=condition.pooled,
            return_dict=False,
        )[0]

    def dispatch_attention(self) -> None:
        """Replace the stock processor, which calls torch's attention itself."""
        for module in self.pipe.transformer.modules():
            if type(getattr(module, "processor", None)).__name__ == "JointAttnProcessor2_0":
                module.set_processor(JointAttention())


class JointAttention:
    """diffusers' JointAttnProcessor2_0 with a choice of kernel."""

    _attention_backend: str | None = None
    """Set by diffusers' `set_attention_backend`."""
    _parallel_config = None
    """Set by diffusers' `enable_parallelism`; None, as it has no context-parallel plan for SD3."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of image tokens [B, N, C], and of text tokens [B, M, C] if given, over both."""
        heads = (attn.heads, -1)
        q, k, v = (layer(hidden_states).unflatten(-1, heads) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k = (x if norm is None else norm(x) for x, norm in ((q, attn.norm_q), (k, attn.norm_k)))
        if encoder_hidden_states is not None:
            layers = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
            text_q, text_k, text_v = (layer(encoder_hidden_states).unflatten(-1, heads) for layer in layers)
            text_q = text_q if attn.norm_added_q is None else attn.norm_added_q(text_q)
            text_k = text_k if attn.norm_added_k is None else attn.norm_added_k(text_k)
            q, k, v = torch.cat([q, text_q], 1), torch.cat([k, text_k], 1), torch.cat([v, text_v], 1)
        out = dispatch_attention_fn(q, k, v, backend=self._attention_backend).flatten(2)
        if encoder_hidden_states is None:
            return attn.to_out[1](attn.to_out[0](out))
        image, text = out.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image)), text if attn.context_pre_only else attn.to_add_out(text)

"""Blocks of Qwen-Image and its editing models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from torch import Tensor

from prefgrpo.models.blocks.kept import keeps_inputs
from prefgrpo.models.blocks.parts import TOKENS, Stream, feed_forward, joint, random_tokens


class QwenImageDouble(QwenImageTransformerBlock):
    """Text and image, each with layers of its own, in one attention."""

    @keeps_inputs
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
        joint_attention_kwargs: Any = None,
        modulate_index: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Text [B, M, C] and image [B, N, C]; text is masked where context parallelism pads it."""
        if modulate_index is not None:  # sources with a time of their own (Qwen-Image-Edit-2511)
            arguments = (hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, image_rotary_emb)
            return super().forward(*arguments, joint_attention_kwargs, modulate_index)
        mask = None
        if encoder_hidden_states_mask is not None:
            seen = encoder_hidden_states_mask.new_ones(hidden_states.shape[:2])
            mask = torch.cat([encoder_hidden_states_mask, seen], 1)[:, None, None]
        image_turns, text_turns = image_rotary_emb
        turns = torch.cat([text_turns, image_turns])
        attn = self.attn
        image = self.img_mod(temb).chunk(6, 1)
        text = self.txt_mod(temb).chunk(6, 1)
        eps = self.img_norm1.eps
        hidden_states, encoder_hidden_states = joint(
            attn,
            Stream(hidden_states, image, attn.to_out[0], partial(feed_forward, self.img_mlp), eps),
            Stream(encoder_hidden_states, text, attn.to_add_out, partial(feed_forward, self.txt_mlp), eps),
            (turns.real, turns.imag),
            mask,
            text_first=True,
        )
        return encoder_hidden_states, hidden_states

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        temb = torch.randn(2, self.dim, dtype=dtype, device=device)
        angles = (6 * torch.rand(n, self.attention_head_dim // 2, device=device) for n in TOKENS)
        turns = tuple(torch.polar(torch.ones_like(angle), angle) for angle in angles)
        more = {"encoder_hidden_states_mask": None, "temb": temb, "image_rotary_emb": turns}
        return random_tokens(self.dim, dtype, device) | more

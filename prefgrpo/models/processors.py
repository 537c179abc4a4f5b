"""Versions of transformers' processors that do not need torchvision, with only what the pipelines use.

transformers builds a `Qwen2VLProcessor` or `Qwen3VLProcessor` only with a video processor, a `PixtralProcessor` only
with torchvision's resizing. Qwen-Image shows its language model no videos, and FLUX.2 neither videos nor images.
Invariant: a folder saved with these classes loads with transformers' own classes where torchvision is installed.
"""

from __future__ import annotations

from typing import Any

from transformers import ProcessorMixin
from transformers import Qwen2VLProcessor as Qwen2
from transformers import Qwen3VLProcessor as Qwen3


class _NoVideos(ProcessorMixin):
    """Base of both Qwen processors."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    def to_dict(self) -> dict[str, Any]:
        """The settings, including a default video processor's."""
        name = type(self).__name__.replace("Processor", "VideoProcessor")
        return super().to_dict() | {"video_processor": {"video_processor_type": name}}


class Qwen2VLProcessor(_NoVideos, Qwen2):
    """A `Qwen2VLProcessor` for text and images."""


class Qwen3VLProcessor(_NoVideos, Qwen3):
    """A `Qwen3VLProcessor` for text and images."""


class PixtralProcessor(ProcessorMixin):
    """A `PixtralProcessor` for text."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.patch_size, self.spatial_merge_size = patch_size, spatial_merge_size
        self.image_token, self.image_break_token, self.image_end_token = image_token, image_break_token, image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)


for own, module in ((Qwen2VLProcessor, Qwen2.__module__), (Qwen3VLProcessor, Qwen3.__module__)):
    own.__module__ = module  # so that `save_pretrained` writes these names into model_index.json
PixtralProcessor.__module__ = "transformers.models.pixtral.processing_pixtral"

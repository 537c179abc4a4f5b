"""What the pipelines need of transformers' processors, without torchvision.

transformers builds a `Qwen2VLProcessor` or `Qwen3VLProcessor` only together with a video processor, and a
`PixtralProcessor` only with torchvision's resizing. Qwen-Image shows its language model no videos, FLUX.2 neither those
nor images. Invariant: a folder saved with these classes loads as transformers' own where torchvision is there.
"""

from __future__ import annotations

from typing import Any

from transformers import ProcessorMixin
from transformers import Qwen2VLProcessor as Qwen2
from transformers import Qwen3VLProcessor as Qwen3


class _NoVideos(ProcessorMixin):
    """What both Qwens' share."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    def to_dict(self) -> dict[str, Any]:
        """Its settings, with the default video processor's."""
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


class NoProcessor:
    """What QwenImage21Pipeline asks its processor when it is built, where no text will be encoded."""

    tokenizer = property(lambda self: self)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """No tokens of a system message."""
        return [[]]

    def encode(self, text: str) -> list[int]:
        """A token."""
        return [0]


for own, module in ((Qwen2VLProcessor, Qwen2.__module__), (Qwen3VLProcessor, Qwen3.__module__)):
    own.__module__ = module  # the names that `save_pretrained` writes into model_index.json
PixtralProcessor.__module__ = "transformers.models.pixtral.processing_pixtral"

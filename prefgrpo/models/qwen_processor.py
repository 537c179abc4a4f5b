"""The image half of Qwen2-VL's processor: what Qwen-Image-Edit needs of it, without torchvision.

transformers builds a `Qwen2VLProcessor` only together with a video processor, which needs torchvision. Editing shows
no videos. Invariant: a folder saved with this class loads as a plain `Qwen2VLProcessor` where torchvision is there.
"""

from __future__ import annotations

from typing import Any

from transformers import Qwen2VLProcessor as Whole

VIDEO = {"video_processor_type": "Qwen2VLVideoProcessor"}


class Qwen2VLProcessor(Whole):
    """A `Qwen2VLProcessor` for text and images."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        super(Whole, self).__init__(image_processor, tokenizer, chat_template=chat_template)

    def to_dict(self) -> dict[str, Any]:
        """Its settings, with the default video processor's."""
        return super().to_dict() | {"video_processor": VIDEO}


Qwen2VLProcessor.__module__ = Whole.__module__  # the name that `save_pretrained` writes into model_index.json

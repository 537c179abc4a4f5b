"""The tiny pairwise judge: tokenizer, chat template, processor files and a batched forward.

A real Qwen3-VL of 0.94 M parameters (text 3 x 128, vision 2 x 64, head_dim 32). Every square image
becomes 64x64, i.e. 16 patches and 4 image tokens. The verdict, at the token after the assistant
prefill "Image ", is P(first) = sigmoid(logit("1") - logit("2")).
Invariant: `PairJudge` feeds the model the tokens that the chat template renders and the pixels that
the saved image processor makes, so the stock forward and a server give the same verdict
(tests/tiny/test_scenes.py).
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from prefgrpo.tiny import scenes

SIDE = 64
PATCH = 16
MERGE = 2
GRID = SIDE // PATCH
PATCHES = GRID**2
IMAGE_TOKENS = (GRID // MERGE) ** 2
WIDTH = 128
VISION_WIDTH = 64
LAYERS = 3
VISION_LAYERS = 2
HEAD_DIM = 32
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
USER_PARTS = ("Caption: {}\nImage 1: ", "\nImage 2: ", "\nWhich image matches the caption better?")
PREFILL = "Image "
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}"
    "{{- message['content'] }}"
    "{%- else %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] in ['image', 'image_url'] %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] in ['video', 'video_url'] %}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'text' %}"
    "{{- part['text'] }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# A word includes the space before it; each digit is separate.
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the captions and the template: every word is one token."""
    captions = [text for split in scenes.SPLITS for text in scenes.prompts(split)]
    texts = captions + [USER_PARTS[0].format(text) for text in captions]
    texts += [*USER_PARTS, PREFILL + "1", PREFILL + "2", "user\n", "assistant\n", "system\n"] * 60
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORD), "isolated"), byte_level])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    bpe.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
        model_max_length=8192,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """The untrained Qwen3-VL."""
    token = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64, "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": WIDTH // HEAD_DIM, "num_key_value_heads": WIDTH // HEAD_DIM // 2,
        "head_dim": HEAD_DIM, "max_position_embeddings": 8192, "initializer_range": 0.06,
        "pad_token_id": token("<|endoftext|>"), "bos_token_id": None,
        "eos_token_id": token("<|im_end|>"),
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "depth": VISION_LAYERS, "hidden_size": VISION_WIDTH, "intermediate_size": 2 * VISION_WIDTH,
        "num_heads": VISION_WIDTH // HEAD_DIM, "patch_size": PATCH, "spatial_merge_size": MERGE,
        "temporal_patch_size": 2, "out_hidden_size": WIDTH, "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0], "initializer_range": 0.06,
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(eos_token_id=token("<|im_end|>"), pad_token_id=token("<|endoftext|>"))
    return model


def messages(caption: str) -> list[dict[str, object]]:
    """The chat of one comparison; `image` parts are empty (pixels are passed separately)."""
    before, between, after = USER_PARTS
    content = [
        {"type": "text", "text": before.format(caption)},
        {"type": "image"},
        {"type": "text", "text": between},
        {"type": "image"},
        {"type": "text", "text": after},
    ]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": PREFILL}]


def pixel_patches(images: Tensor) -> Tensor:
    """The image processor on a batch: float [n, 3, H, W] in [0, 1] -> [n * 16, 1536].

    8-bit rounding, bicubic resize to 64x64, 8-bit rounding, (x - 0.5) / 0.5, and patches in the
    order of 2x2 merge blocks, each repeated for the two frames of a temporal patch.
    """
    n = len(images)
    blocks = GRID // MERGE
    x = (images * 255).round()
    if x.shape[2:] != (SIDE, SIDE):
        x = F.interpolate(x, (SIDE, SIDE), mode="bicubic", antialias=True).round().clamp(0, 255)
    x = x / 127.5 - 1
    x = x.view(n, 3, blocks, MERGE, PATCH, blocks, MERGE, PATCH)
    x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)  # image, block y, x, patch y, x, channel, pixel y, x
    x = x.reshape(n * PATCHES, 3, 1, PATCH, PATCH).expand(-1, -1, 2, -1, -1)
    return x.reshape(n * PATCHES, -1)


def _per_image_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **kwargs: object
) -> tuple[Tensor, None]:
    """Vision attention for many images of PATCHES patches at once, instead of one by one.

    q, k, v [1, heads, n * 16, d] -> [1, n * 16, heads, d].
    """
    heads, length, dim = q.shape[1:]

    def per_image(t: Tensor) -> Tensor:
        return t.view(heads, -1, PATCHES, dim).transpose(0, 1)

    out = F.scaled_dot_product_attention(per_image(q), per_image(k), per_image(v), scale=HEAD_DIM**-0.5)
    return out.transpose(1, 2).reshape(1, length, heads, dim), None


AttentionInterface.register("equal_tiles", _per_image_attention)


class PairJudge(nn.Module):
    """The judge with a batched forward over many 32x32 pairs; used for training and scoring."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        if folder is None:
            self.tokenizer = build_tokenizer()
            self.model = build_model(self.tokenizer)
        else:
            path = Path(folder).resolve()
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            self.model = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        self.visual = self.model.model.visual
        self.text = self.model.model.language_model
        self.visual.set_attn_implementation("equal_tiles")
        self.image_token = self.model.config.image_token_id
        self.first, self.second = (self.tokenizer(d)["input_ids"][-1] for d in "12")
        self._prompts: dict[str, tuple[Tensor, Tensor]] = {}

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images -> (merged tokens [n, 4, 128], deepstack tokens [n, 4, 128])."""
        n = len(images)
        grid = torch.tensor([[1, GRID, GRID]]).expand(n, 3)
        cu_seqlens = torch.tensor([0, n * PATCHES], dtype=torch.int32)  # one call; see _per_image_attention
        out = self.visual(pixel_patches(images), grid_thw=grid, cu_seqlens=cu_seqlens)
        deep = out.deepstack_features[0]
        return out.pooler_output.view(n, IMAGE_TOKENS, -1), deep.view(n, IMAGE_TOKENS, -1)

    def prompt(self, caption: str) -> tuple[Tensor, Tensor]:
        """Token ids [L] and 3-d rope positions [3, L] of one comparison (cached)."""
        if caption not in self._prompts:
            text = self.tokenizer.apply_chat_template(messages(caption), tokenize=False, continue_final_message=True)
            text = text.replace("<|image_pad|>", "<|image_pad|>" * IMAGE_TOKENS)
            ids = torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            positions = self.model.model.get_rope_index(
                ids[None],
                mm_token_type_ids=(ids[None] == self.image_token).int(),
                image_grid_thw=torch.tensor([[1, GRID, GRID]] * 2),
                attention_mask=torch.ones_like(ids[None]),
            )[0][:, 0]
            self._prompts[caption] = ids, positions
        return self._prompts[caption]

    def states(
        self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], captions: list[str]
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Hidden states after each layer and token ids [n, L]; captions of equal token count."""
        rows = [self.prompt(text) for text in captions]
        ids = torch.stack([row[0] for row in rows])
        positions = torch.stack([row[1] for row in rows], 1)
        at_image = ids == self.image_token
        embeds = self.text.embed_tokens(ids)
        tokens, deep = (torch.cat(two, 1).flatten(0, 1) for two in zip(first, second, strict=True))
        embeds = embeds.masked_scatter(at_image[..., None].expand_as(embeds), tokens)
        out = self.text(
            inputs_embeds=embeds,
            position_ids=positions,
            visual_pos_masks=at_image,
            deepstack_visual_embeds=[deep],
            use_cache=False,
            output_hidden_states=True,
        )
        return (*out.hidden_states[:-1], out.last_hidden_state), ids

    def logits(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """Last hidden states [n, L, 128] -> (logit("1") - logit("2") [n], all logits [n, V])."""
        logits = self.model.lm_head(last[:, -1])
        return logits[:, self.first] - logits[:, self.second], logits

    @torch.no_grad()
    def prob(self, first: Tensor, second: Tensor, captions: list[str], batch: int = 256) -> Tensor:
        """P(first image matches its caption better): images [n, 3, H, W] -> [n]."""
        by_length: dict[int, list[int]] = {}
        for i, text in enumerate(captions):
            by_length.setdefault(len(self.prompt(text)[0]), []).append(i)
        logit_difference = torch.empty(len(captions))
        for rows in by_length.values():
            for chunk in torch.tensor(rows).split(batch):
                before, after = self.encode(first[chunk]), self.encode(second[chunk])
                hidden, _ = self.states(before, after, [captions[i] for i in chunk.tolist()])
                logit_difference[chunk] = self.logits(hidden[-1])[0]
        return logit_difference.sigmoid()

    def save(self, folder: Path) -> None:
        """Write bf16 weights, tokenizer, chat template and the processor's settings."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.model.float()
        self.tokenizer.save_pretrained(folder)
        for name, settings in processor_files().items():
            (folder / name).write_text(json.dumps(settings, indent=2) + "\n")


def processor_files() -> dict[str, dict[str, object]]:
    """Settings of the stock Qwen3-VL processors: every square image becomes 64x64."""
    common: dict[str, object] = {
        "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
    }
    return {
        "preprocessor_config.json": {**common, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {**common, "video_processor_type": "Qwen3VLVideoProcessor"},
    }

"""An in-process judge: a Qwen-VL checkpoint run with transformers, without a server or torchvision.

    P(first) = sigmoid(log p(label 1) − log p(label 2)) at the token after the prefill

Each medium is encoded once per call. With cached keys and values, the text and source images before the media run once
per call, the prompt up to the last image once per image before it, and only the rest once per question. A
call's answers depend only on that call, and equal those of the stock model on single questions up to fp32 rounding.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, DynamicCache

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.judge.answers import MIN_LABEL_MASS, two_label_softmax
from prefgrpo.judge.client import Judge
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.template import SOURCE, Query, Template, spelled
from prefgrpo.judge.tokens import any_of, refusal
from prefgrpo.judge.uploads import downscale

_FAMILIES = ("qwen3_vl", "qwen2_5_vl")
_SHARED_TOKENS = 64
"""From this many tokens on, the text before the first image runs once per group instead of once per first image."""
Features = tuple[Tensor, ...]
"""Vision tokens [n, H] of one image, followed by its deepstack features [n, H], one per layer that receives them."""


class LocalJudge(Judge):
    """A model loaded in this process."""

    streams = False
    clips = False
    batch = 256
    """Maximum number of questions per language-model call."""
    min_label_mass = MIN_LABEL_MASS

    def __init__(self, model: str, device: str = "auto", *, dtype: torch.dtype | None = None) -> None:
        """`model`: folder or hub id of a Qwen3-VL or Qwen2.5-VL checkpoint; run on a torch `device` in `dtype`
        (auto: this process's current GPU, if there is one).

        dtype: by default bf16 on a GPU, as rewards are (an 8B judge then takes 17 GB instead of 33), and float32 on a
        CPU.
        """
        if device == "auto":
            device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        self.device = device
        try:
            kind = AutoConfig.from_pretrained(model).model_type
        except (OSError, ValueError) as error:
            raise JudgeError(
                f"cannot load the judge '{model}', expected a checkpoint's folder or hub id: {error}"
            ) from error
        if kind not in _FAMILIES:
            raise JudgeError(f"{model} is a '{kind}' model: expected one of {', '.join(_FAMILIES)}")
        if dtype is None:
            dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        self.model = model
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.processor: Any = AutoImageProcessor.from_pretrained(model)
        self.net: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).eval()
        for parameter in self.net.parameters():  # copy out of the unaligned file mapping, which selects other kernels
            parameter.data = parameter.data.clone().requires_grad_(False)
        self.net.to(device)
        self._labels: dict[Template, list[Tensor]] = {}
        self._thread = ThreadPoolExecutor(1, "judge")
        self.pad: int = self.net.config.image_token_id
        self._pad_text: str = self.tokenizer.convert_ids_to_tokens(self.pad)
        added = self.tokenizer.added_tokens_decoder.values()
        self.special = any_of({self._pad_text, *(token.content for token in added if token.special)})

    def check(self, template: Template) -> None:
        """As in Judge: its answer must be soft, with labels of one token, and sources come before the media."""
        if template.answer != "soft" or template.labels is None:
            raise JudgeError(
                f"template '{template.name}' asks for a text answer; the in-process judge needs a template with labels"
            )
        if SOURCE in [piece for piece in template.parts(defaultdict(str)) if isinstance(piece, int)][1:]:
            raise JudgeError(f"template '{template.name}' shows the source after {{media_1}}: use a server")
        if template not in self._labels:
            self._labels[template] = [torch.tensor(ids) for ids in label_ids(self.tokenizer, template)]

    async def ask(self, query: Query, once: bool = False) -> Answer:
        """As in Judge, on a thread of its own."""
        return (await asyncio.get_running_loop().run_in_executor(self._thread, self.ask_all, [query]))[0]

    @torch.inference_mode()
    def ask_all(self, queries: Sequence[Query]) -> list[Answer]:
        """As in Judge; consecutive questions that differ only in their media share work."""
        answers: list[Answer] = []
        for _, alike in groupby(queries, key=lambda query: (query.template, query.texts, tuple(query.source))):
            answers += self._group(list(alike))
        return answers

    def _group(self, queries: Sequence[Query]) -> list[Answer]:
        """The answers to questions that differ only in their media."""
        start = time.perf_counter()
        first = queries[0]
        self.check(first.template)
        if reason := refusal(self.special, first.parts) or first.lacks_source:
            return [Answer(None, reason)] * len(queries)
        source = first.source if first.template.takes_source else ()
        media = list(dict.fromkeys(medium for query in queries for medium in query.media))
        place = {medium: k for k, medium in enumerate(media)}
        features, grids = self._encode([*media, *source], first.template.max_pixels)
        asked = [tuple(place[medium] for medium in query.media) for query in queries]
        buckets: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for n, shown in enumerate(asked):
            buckets[tuple(grids[k] for k in shown)].append(n)
        logp = torch.empty(len(queries), 2)
        for sizes, rows in buckets.items():
            grid = torch.tensor([*grids[len(media) :], *sizes])
            chosen = [asked[n] for n in rows]
            logp[rows] = self._log_probs(first, features[: len(media)], features[len(media) :], grid, chosen)
        share = (time.perf_counter() - start) / len(queries)
        return [
            Answer(*two_label_softmax(a, b, self.min_label_mass), raw=f"logp {a:.4f} {b:.4f}", seconds=share)
            for a, b in logp.tolist()
        ]

    def _encode(self, media: Sequence[Media], max_pixels: int) -> tuple[list[Features], list[tuple[int, ...]]]:
        """Vision features and patch grid (t, h, w) of each image."""
        inputs = self.processor(images=[downscale(m, max_pixels).pil for m in media], return_tensors="pt")
        grid = inputs["image_grid_thw"]
        pixels = inputs["pixel_values"].to(self.device)
        out = self.net.model.get_image_features(pixels, grid.to(self.device), return_dict=True)
        layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
        return list(zip(*layers, strict=True)), [tuple(g) for g in grid.tolist()]

    def _tokens(self, query: Query, grid: Tensor, sources: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Token ids [L], rotary positions [3, L] and start indices of the first and the last medium, for n image grids
        [n, 3], of which the first are those of the sources."""
        prefill = query.template.prefill
        turns = query.template.messages(query.texts, sources)
        end = "continue_final_message" if prefill else "add_generation_prompt"
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, **{end: True})
        if not text.endswith(prefill):  # some chat templates strip its white space
            text = text.removesuffix(prefill.strip()) + prefill
        sizes = (grid.prod(1) // self.net.config.vision_config.spatial_merge_size**2).tolist()
        pieces = text.split(self._pad_text)
        if len(pieces) != len(sizes) + 1:
            raise JudgeError(f"the chat template of {self.model} wrote {len(pieces) - 1} images, expected {len(sizes)}")
        text = "".join(piece + self._pad_text * size for piece, size in zip(pieces, [*sizes, 0], strict=True))
        ids = torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        kinds = (ids == self.pad).int()[None]
        positions, _ = self.net.model.get_rope_index(
            ids[None], mm_token_type_ids=kinds, image_grid_thw=grid, attention_mask=torch.ones_like(ids)[None]
        )
        pads = (ids == self.pad).nonzero()[:, 0]
        return ids, positions[:, 0], (int(pads[sum(sizes[:sources])]), int(pads[sum(sizes[:-1])]))

    def _log_probs(
        self,
        query: Query,
        features: list[Features],
        source: list[Features],
        grid: Tensor,
        asked: list[tuple[int, ...]],
    ) -> Tensor:
        """Log-probabilities [n, 2] of the two labels for n questions like `query`; `grid`: patch grids of the sources
        and the media of one question; asked: the media of each, as indices of their features."""
        ids, positions, (start, cut) = self._tokens(query, grid, len(source))
        heads = sorted({shown[:-1] for shown in asked})
        row = {head: r for r, head in enumerate(heads)}
        cache = None
        if start >= _SHARED_TOKENS or source:
            out = self._forward(ids[:start], positions[:, :start], [_joined(source)], None)
            cache = _rows(out.past_key_values, torch.zeros(len(heads), dtype=torch.long))
        start = start if cache else 0
        if cut > start:
            images = [_joined([features[k] for k in head]) for head in heads]
            cache = self._forward(ids[start:cut], positions[:, start:cut], images, cache).past_key_values
        result = []
        for k in range(0, len(asked), self.batch):
            chunk = asked[k : k + self.batch]
            own = None if cache is None else _rows(cache, torch.tensor([row[shown[:-1]] for shown in chunk]))
            out = self._forward(ids[cut:], positions[:, cut:], [features[shown[-1]] for shown in chunk], own)
            logp = self.net.lm_head(out.last_hidden_state[:, -1]).float().log_softmax(-1)
            result.append(torch.stack([logp[:, ids].logsumexp(-1) for ids in self._labels[query.template]], 1).cpu())
        return torch.cat(result)

    def _forward(self, ids: Tensor, positions: Tensor, images: list[Features], cache: DynamicCache | None) -> Any:
        """Run the language model on n copies of `ids` [L], with a different image each in the image tokens, if any."""
        n = len(images)
        device = self.device
        language = self.net.model.language_model
        embeds = language.embed_tokens(ids.to(device))[None].repeat(n, 1, 1)
        extra: dict[str, Any] = {}
        if images[0]:
            where = (ids == self.pad).to(device)
            vision, *deep = (torch.stack(layer) for layer in zip(*images, strict=True))
            embeds[:, where] = vision.to(embeds.dtype)
            if deep:
                extra["visual_pos_masks"] = where.expand(n, -1)
                extra["deepstack_visual_embeds"] = [d.flatten(0, 1) for d in deep]
        return language(
            inputs_embeds=embeds,
            position_ids=positions[:, None].expand(-1, n, -1).to(device),
            past_key_values=cache,
            use_cache=True,
            **extra,
        )


def _joined(images: Sequence[Features]) -> Features:
    """Several images, one after the other; () for none."""
    return tuple(torch.cat(layer) for layer in zip(*images, strict=True))


def _rows(cache: DynamicCache, rows: Tensor) -> DynamicCache:
    """A copy of a cache that selects `rows` of its batch."""
    chosen = DynamicCache()
    for index, layer in enumerate(cache.layers):
        chosen.update(layer.keys[rows], layer.values[rows], index)
    return chosen


def label_ids(tokenizer: Any, template: Template) -> list[list[int]]:
    """The ids of all tokens that count as each label: those that equal it up to white space, and case (variants).

    Raises JudgeError unless each label is one token that leaves the prefill's tokens intact.
    """
    before = list(tokenizer(template.prefill, add_special_tokens=False)["input_ids"])
    texts = [spelled(text, template.variants) for text in tokenizer.batch_decode([[k] for k in range(len(tokenizer))])]
    found = []
    for label in template.labels or ():
        joined = list(tokenizer(template.prefill + label, add_special_tokens=False)["input_ids"])
        if joined[:-1] != before:
            raise JudgeError(
                f"the judge's tokenizer does not read the label {label!r} after the prefill {template.prefill!r} as "
                f"one more token ({before} becomes {joined}); end the prefill without a space and start the labels "
                "with one, or the other way round"
            )
        found.append([k for k, text in enumerate(texts) if text == spelled(label, template.variants)])
    return found

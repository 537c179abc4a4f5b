"""An in-process judge: a Qwen-VL checkpoint run with transformers, without a server or torchvision.

    P(first) = sigmoid(log p(label 1) − log p(label 2)) at the token after the prefill

Each medium is encoded once per group. With cached keys and values, the text and source images before the pair run once
per group, the prompt up to the second image once per first image, and only the rest once per pair. A group's verdicts
depend only on that group, and equal those of the stock model on single pairs up to fp32 rounding.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, DynamicCache

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.judge.answers import MIN_LABEL_MASS, two_label_softmax
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.pairs import Pair, PairJudge
from prefgrpo.judge.request import downscale
from prefgrpo.judge.special_tokens import any_of, refusal
from prefgrpo.judge.template import SHOWN, SOURCE, Shown, Template, load_template, spelled

_FAMILIES = ("qwen3_vl", "qwen2_5_vl")
_SHARED_TOKENS = 64
"""From this many tokens on, the text before the first image runs once per group instead of once per first image."""
Features = tuple[Tensor, ...]
"""Vision tokens [n, H] of one image, followed by its deepstack features [n, H], one per layer that receives them."""


class LocalJudge(PairJudge):
    """Judges groups with a model loaded in this process."""

    streams = False
    pair_batch = 256
    """Most pairs per language-model call."""
    min_label_mass = MIN_LABEL_MASS

    def __init__(
        self,
        model: str,
        template: str = "compare",
        device: str = "auto",
        *,
        dtype: torch.dtype | None = None,
        shown: Shown = SHOWN,
    ) -> None:
        """`model`: folder or hub id of a Qwen3-VL or Qwen2.5-VL checkpoint; run on a torch `device` in `dtype`
        (auto: this process's current GPU, if there is one).

        dtype: by default bf16 on a GPU, as rewards are (an 8B judge then takes 17 GB instead of 33), and float32 on a
        CPU. template: shipped name or path; its answer must be soft. shown: instead of what the template says.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = device
        self.template = load_template(template, shown=shown)
        if self.template.answer != "soft" or self.template.labels is None:
            raise JudgeError(
                f"template '{template}' asks for a text answer; the in-process judge needs a template with labels"
            )
        if SOURCE in [part for part in self.template.parts({"prompt": ""}) if isinstance(part, int)][1:]:
            raise JudgeError(f"template '{template}' shows the source after {{media_1}}: use a server")
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
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.processor: Any = AutoImageProcessor.from_pretrained(model)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).eval()
        for parameter in self.model.parameters():  # copy out of the unaligned file mapping, which selects other kernels
            parameter.data = parameter.data.clone().requires_grad_(False)
        self.model.to(device)
        self.labels = [torch.tensor(ids) for ids in label_ids(self.tokenizer, self.template)]
        self.pad: int = self.model.config.image_token_id
        self._pad_text: str = self.tokenizer.convert_ids_to_tokens(self.pad)
        added = self.tokenizer.added_tokens_decoder.values()
        self.special = any_of({self._pad_text, *(token.content for token in added if token.special)})

    @torch.inference_mode()
    def judge_group(
        self, prompt: str, media: Sequence[Media], pairs: Sequence[Pair], source: Sequence[Media] = ()
    ) -> list[Answer]:
        """Verdicts for ordered pairs of one prompt's images; all missing if the prompt contains a special token.

        source: used if the template contains {source}.
        """
        start = time.perf_counter()
        if reason := refusal(self.special, self.template.parts({"prompt": prompt})):
            return [Answer(None, reason)] * len(pairs)
        if self.template.takes_source and not source:
            reason = f"template '{self.template.name}' needs a source image, but the sample has none"
            return [Answer(None, reason)] * len(pairs)
        source = source if self.template.takes_source else ()
        features, grids = self._encode([*media, *source])
        buckets: dict[tuple[Any, Any], list[int]] = defaultdict(list)
        for n, (i, j) in enumerate(pairs):
            buckets[grids[i], grids[j]].append(n)
        logp = torch.empty(len(pairs), 2)
        for (grid_1, grid_2), rows in buckets.items():
            chosen = [pairs[n] for n in rows]
            shown = torch.tensor([*grids[len(media) :], grid_1, grid_2])
            logp[rows] = self._log_probs(prompt, features[: len(media)], features[len(media) :], shown, chosen)
        share = (time.perf_counter() - start) / max(len(pairs), 1)
        return [
            Answer(*two_label_softmax(a, b, self.min_label_mass), raw=f"logp {a:.4f} {b:.4f}", seconds=share)
            for a, b in logp.tolist()
        ]

    def _encode(self, media: Sequence[Media]) -> tuple[list[Features], list[tuple[int, ...]]]:
        """Vision features and patch grid (t, h, w) of each image."""
        inputs = self.processor(images=[downscale(m, self.template.max_pixels).pil for m in media], return_tensors="pt")
        grid = inputs["image_grid_thw"]
        pixels = inputs["pixel_values"].to(self.device)
        out = self.model.model.get_image_features(pixels, grid.to(self.device), return_dict=True)
        layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
        return list(zip(*layers, strict=True)), [tuple(g) for g in grid.tolist()]

    def _tokens(self, prompt: str, grid: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Token ids [L], rotary positions [3, L] and start indices of the pair's images, for n image grids [n, 3]."""
        turns = self.template.messages(prompt, sources=len(grid) - 2)
        end = "continue_final_message" if self.template.prefill else "add_generation_prompt"
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, **{end: True})
        prefill = self.template.prefill
        if not text.endswith(prefill):  # some chat templates cut its white space
            text = text.removesuffix(prefill.strip()) + prefill
        sizes = (grid.prod(1) // self.model.config.vision_config.spatial_merge_size**2).tolist()
        pieces = text.split(self._pad_text)
        if len(pieces) != len(sizes) + 1:
            raise JudgeError(
                f"the chat template of {self.model.name_or_path} wrote {len(pieces) - 1} images, expected {len(sizes)}"
            )
        text = "".join(piece + self._pad_text * size for piece, size in zip(pieces, [*sizes, 0], strict=True))
        ids = torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        kinds = (ids == self.pad).int()[None]
        positions, _ = self.model.model.get_rope_index(
            ids[None], mm_token_type_ids=kinds, image_grid_thw=grid, attention_mask=torch.ones_like(ids)[None]
        )
        pads = (ids == self.pad).nonzero()[:, 0]
        return ids, positions[:, 0], (int(pads[sum(sizes[:-2])]), int(pads[sum(sizes[:-1])]))

    def _log_probs(
        self, prompt: str, features: list[Features], source: list[Features], grid: Tensor, pairs: list[Pair]
    ) -> Tensor:
        """Log-probabilities [n, 2] of the two labels for n pairs; `grid`: patch grids of the sources and the pair."""
        ids, positions, (start, cut) = self._tokens(prompt, grid)
        firsts = sorted({i for i, _ in pairs})
        row = {i: r for r, i in enumerate(firsts)}
        cache = None
        if start >= _SHARED_TOKENS or source:
            before = tuple(torch.cat(layer) for layer in zip(*source, strict=True))
            out = self._forward(ids[:start], positions[:, :start], [before], None)
            cache = _rows(out.past_key_values, torch.zeros(len(firsts), dtype=torch.long))
        start = start if cache else 0
        head = self._forward(ids[start:cut], positions[:, start:cut], [features[i] for i in firsts], cache)
        result = []
        for k in range(0, len(pairs), self.pair_batch):
            chunk = pairs[k : k + self.pair_batch]
            cache = _rows(head.past_key_values, torch.tensor([row[i] for i, _ in chunk]))
            out = self._forward(ids[cut:], positions[:, cut:], [features[j] for _, j in chunk], cache)
            logp = self.model.lm_head(out.last_hidden_state[:, -1]).float().log_softmax(-1)
            result.append(torch.stack([logp[:, ids].logsumexp(-1) for ids in self.labels], 1).cpu())
        return torch.cat(result)

    def _forward(self, ids: Tensor, positions: Tensor, images: list[Features], cache: DynamicCache | None) -> Any:
        """Run the language model on n copies of `ids` [L], with a different image each in the image tokens, if any."""
        n = len(images)
        device = self.device
        language = self.model.model.language_model
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

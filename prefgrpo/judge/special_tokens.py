"""Special tokens in prompts: a tokenizer turns the text <|image_pad|> into the token itself, wherever it stands.

The images then no longer match their placeholders, or the turn ends early, and the server answers without an error.
Invariant: such a question is never asked; its verdict is missing, and the reason names the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

KNOWN = re.compile(
    r"<\|[^<>|\s]{1,40}\|?>|<[^<>|\s]{1,40}\|>"  # Qwen-VL, Llama, Phi, GLM-V, Kimi-VL, Gemma 4
    r"|<｜[^<>｜\s]{1,40}｜>"  # DeepSeek-VL
    r"|</?(?:s|box|point|quad|ref|slice)>|<(?:unk|pad|bos|eos|mask|sop|eop)>"  # LLaVA, InternVL, MiniCPM-V
    r"|</?(?i:(?:audio|frame|im|image|img|patch|video)(?:_[a-z_]+)?)>"  # those, Step3-VL, Ovis, Gemma 3
    r"|<(?:start|end)_of_(?:turn|image|audio)>"  # Gemma 3
    r"|<end_of_utterance>|<fake_token_around_image>|<global-img>|<row_\d+_col_\d+>"  # SmolVLM, Idefics
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS)\]|\[IMG(?:_BREAK|_END)?\]"  # Pixtral
    r"|\[(?:g|s)?MASK\]|\[(?:BOS|EOS|EOT|PAD|UNK)\]"  # GLM-V, Kimi-VL
)
"""Special tokens of common judge families, for servers that do not report theirs."""


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of these tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def served_tokens(reply: bytes) -> re.Pattern[str] | None:
    """A pattern of the special tokens that vLLM's /tokenizer_info reports (a tokenizer_config.json); None if it reports
    none."""
    try:
        config = json.loads(reply)
        tokens = {token for token in _special(config) if token}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return any_of(tokens) if tokens else None


def _special(config: dict[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if key.endswith("_token"):
            yield _text(value)
        elif key in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"):
            yield from map(_text, value.values() if isinstance(value, dict) else value or ())
        elif key == "added_tokens_decoder":
            for token in value.values():
                # vLLM leaves out which are special; Gemma's others are white space and HTML
                if token["special"] if isinstance(token, dict) else KNOWN.fullmatch(token):
                    yield _text(token)


def _text(token: Any) -> str:
    """A token's text; '' for a flag such as add_bos_token, or none."""
    text = token["content"] if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def refusal(special: re.Pattern[str], texts: Iterable[object]) -> str:
    """Why a question with these texts cannot be asked; '' if it can. Parts other than str are images."""
    for text in texts:
        found = special.search(text) if isinstance(text, str) else None
        if found:
            return f"the prompt (or the template) contains the judge's special token {found[0]}"
    return ""

"""What a judge's tokenizer and chat template make of a question's texts.

A tokenizer turns the text <|image_pad|> of a prompt into the token itself, wherever it stands. The images then no
longer match their placeholders, or the turn ends early, and the server answers without an error. So a question with a
special token is never asked: its answer is missing, and the reason names the token.

Some chat templates (Qwen3.5, Qwen3.6, Gemma 3) strip the space at the end of a prefill such as "Image ". The judge
would then answer after "Image", one token before the label. vLLM's /tokenize reveals this, and the token of the space:
the server is forced to write it (`allowed_token_ids`), and the label is read after it. Its log-probabilities are those
before that restriction (vLLM's default, `raw_logprobs`), so verdicts are those after the whole prefill. Invariant:
where the space is stripped and cannot be forced, the question is not asked; the reason says what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from prefgrpo.judge.http import Endpoint, Failure, Kind
from prefgrpo.judge.template import Template

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
_WRITING = ("chat_template", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
"""Fields of a request that decide how a server writes a conversation."""


# ---- special tokens --------------------------------------------------------------------------------------------------


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


# ---- the space after a prefill ---------------------------------------------------------------------------------------


async def missing_space(endpoint: Endpoint, path: str, model: str, template: Template, timeout_s: float) -> int | None:
    """The token that a server must write between the prefill and the label; None if none is missing.

    path: that of chat completions. Raises Failure if the label cannot be read.
    """
    kept = template.prefill.rstrip()
    if template.answer != "soft" or kept == template.prefill:
        return None

    async def tokens(prefill: str) -> list[int]:
        """Tokens of a conversation that ends with `prefill`; none if the server does not answer."""
        found = await _ask(endpoint, "/tokenize", _conversation(model, template, prefill), timeout_s, "tokens")
        return found if isinstance(found, list) else []

    async def more_tokens(prefill: str) -> list[int]:
        """`tokens` of a server that answered before."""
        found = await tokens(prefill)
        if not found:
            raise Failure(f"{endpoint.url}: /tokenize answered once, and then not again")
        return found

    refused = _refusal(endpoint, template, "it has no /tokenize (vLLM's), which tells what token the space is")
    try:
        before = await tokens(kept)
    except Failure as failure:  # by a gateway that has no such path (401, 503), or for now
        refused = failure
        before = []
    if not before:
        lengths = []
        for prefill in (template.prefill, kept):
            body = _conversation(model, template, prefill) | {"max_tokens": 1}
            usage = await _ask(endpoint, path, body, timeout_s, "usage")
            lengths.append(usage.get("prompt_tokens") if isinstance(usage, dict) else None)
        if not lengths[0] or lengths[0] != lengths[1]:
            return None
        raise refused
    if await more_tokens(template.prefill) != before:
        return None
    rests = []
    for label in template.labels or ():
        whole = await more_tokens(template.prefill + label)
        rests.append(whole[len(before) :] if whole[: len(before)] == before else [])
    if all(len(rest) == 1 for rest in rests):  # each label is one token with its space
        return None
    if all(len(rest) == 2 and rest[0] == rests[0][0] for rest in rests):
        return int(rests[0][0])
    raise _refusal(endpoint, template, f"the labels {template.labels} are not one token after it")


def _conversation(model: str, template: Template, prefill: str) -> dict[str, Any]:
    """A question without images, with the template's own fields that decide how a conversation is written."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": prefill}]
    fields = {"model": model, "messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    own = json.loads(template.request)
    fields |= {name: own[name] for name in _WRITING if name in own}
    return {name: value for name, value in fields.items() if value is not None}


async def _ask(endpoint: Endpoint, path: str, body: dict[str, Any], timeout_s: float, key: str) -> Any:
    """The value of `key` in a reply; None if the server rejects the request, or sends something else."""
    try:
        return json.loads(await endpoint.post(path, json.dumps(body).encode(), timeout_s)).get(key)
    except (ValueError, AttributeError, RecursionError):
        return None
    except Failure as failure:
        if failure.kind in (Kind.GIVE_UP, Kind.ELSEWHERE):
            return None
        raise


def _refusal(endpoint: Endpoint, template: Template, why: str) -> Failure:
    return Failure(
        f"{endpoint.url}: the model's chat template cuts the space at the end of the prefill {template.prefill!r}, and "
        f"{why}: serve it with a --chat-template that does not trim the assistant's message, or use a template without "
        "a prefill",
        Kind.GIVE_UP,
    )

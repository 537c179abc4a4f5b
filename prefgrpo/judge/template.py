"""Judge templates: YAML files with the user's text, where the prompt and the two media go, and how the answer reads.

    user: text with {prompt}, {media_1}, {media_2}      prefill: start of the assistant's turn
    labels: the two answers that follow the prefill     answer: soft | plain | think | flex     max_tokens: n

Replacement is literal and happens once: braces, quotes or markers inside a prompt stay what they are.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prefgrpo.judge.verdict import JudgeError

_MARKER = re.compile(r"(\{prompt\}|\{media_1\}|\{media_2\})")
_FOLDER = Path(__file__).parent / "templates"
ANSWERS = ("soft", "plain", "think", "flex")
_KEYS = ("user", "prefill", "labels", "answer", "max_tokens")


@dataclass(frozen=True)
class Template:
    """A parsed template."""

    name: str
    """Shipped name or path."""
    pieces: tuple[str, ...]
    """The user's text cut at its markers, markers included."""
    prefill: str
    """Text that the assistant's turn starts with ('' for none)."""
    labels: tuple[str, str] | None
    """The single tokens that mean 'first' and 'second' (soft answers)."""
    answer: str
    """How the answer is read: one of ANSWERS."""
    max_tokens: int
    """Longest answer, in tokens (1 for soft)."""

    def parts(self, prompt: str) -> list[str | int]:
        """The user's turn for `prompt`: text, 0 (first medium), text, 1 (second medium), text; no empty text."""
        parts: list[str | int] = []
        text = ""
        for piece in self.pieces:
            if piece in ("{media_1}", "{media_2}"):
                parts += [text, int(piece == "{media_2}")] if text else [int(piece == "{media_2}")]
                text = ""
            else:
                text += prompt if piece == "{prompt}" else piece
        return [*parts, text] if text else parts

    def messages(self, prompt: str) -> list[dict[str, Any]]:
        """Messages for transformers' chat templates, image parts left open; ends with the prefill if there is one."""
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in self.parts(prompt)]
        turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.prefill:
            turns.append({"role": "assistant", "content": [{"type": "text", "text": self.prefill}]})
        return turns


def shipped() -> list[str]:
    """Names of the templates that come with the package."""
    return sorted(p.stem for p in _FOLDER.glob("*.yaml"))


def load_template(name: str) -> Template:
    """Template by shipped name or by path to a YAML file; JudgeError names what is wrong with it."""
    path = _FOLDER / f"{name}.yaml" if name in shipped() else Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, shipped(), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise JudgeError(
            f"judge template '{name}' not found: expected one of {', '.join(shipped())} or a path to a YAML file{hint}"
        )
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JudgeError(f"judge template {path} is not valid YAML: {error}") from error
    return _parse(name, path, raw)


def _parse(name: str, path: Path, raw: Any) -> Template:
    if not isinstance(raw, dict) or not isinstance(raw.get("user"), str):
        raise JudgeError(f"judge template {path}: expected a mapping with a text 'user', got {type(raw).__name__}")
    if unknown := sorted(set(raw) - set(_KEYS)):
        raise JudgeError(f"judge template {path}: unknown key(s) {unknown}; expected {', '.join(_KEYS)}")
    pieces = tuple(p for p in _MARKER.split(raw["user"]) if p)
    for marker in ("{prompt}", "{media_1}", "{media_2}"):
        if (n := pieces.count(marker)) != 1 and not (marker == "{prompt}" and n > 1):
            raise JudgeError(f"judge template {path}: expected {marker} once in 'user', found it {n} times")
    if pieces.index("{media_1}") > pieces.index("{media_2}"):
        raise JudgeError(f"judge template {path}: {{media_1}} must come before {{media_2}}")
    labels = raw.get("labels")
    answer = raw.get("answer", "soft" if labels else "plain")
    if answer not in ANSWERS:
        raise JudgeError(f"judge template {path}: expected answer to be one of {', '.join(ANSWERS)}, got {answer!r}")
    if answer == "soft" and not (isinstance(labels, list) and len(labels) == 2 and labels[0] != labels[1]):
        raise JudgeError(f"judge template {path}: a soft answer needs two different labels, got {labels!r}")
    texts = (str(labels[0]), str(labels[1])) if labels else None
    tokens = int(raw.get("max_tokens", {"soft": 1, "plain": 32, "think": 2048, "flex": 2048}[answer]))
    return Template(name, pieces, str(raw.get("prefill") or ""), texts, answer, tokens)


def label_ids(tokenizer: Any, prefill: str, labels: tuple[str, str]) -> tuple[int, int]:
    """Token ids of the two labels right after `prefill`; JudgeError unless each is one token that leaves it intact."""
    before = tokenizer(prefill, add_special_tokens=False)["input_ids"]
    ids = []
    for label in labels:
        joined = tokenizer(prefill + label, add_special_tokens=False)["input_ids"]
        if joined[:-1] != before:
            raise JudgeError(
                f"the judge's tokenizer does not read the label {label!r} after the prefill {prefill!r} as one more "
                f"token ({before} becomes {joined}); end the prefill without a space and start the labels with one, "
                "or the other way round"
            )
        ids.append(int(joined[-1]))
    return ids[0], ids[1]

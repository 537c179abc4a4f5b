"""Texts that others publish inside Python files, which are read from their syntax trees and never executed.

A judge that was trained on one question answers another one worse, or in a form that is not read, and a reward model
needs the text of its training. Their licences are their publishers', so they are not in this package; `prefgrpo judge
prompts` (`main`) fetches the questions of the shipped templates: a file of a fixed commit, or of a checkout, whose hash
it verifies, becomes a template in the user's cache.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from prefgrpo.config.recipe import did_you_mean
from prefgrpo.judge.http import JudgeError

_PREF_GRPO = (
    "CodeGoat24/Pref-GRPO", "3e787f6dd5a3051b40d61f07e9578468ac26130a", "fastvideo/rewards/templates.py",
    "e67cd7b04da217f01009de5d0e172218cd8f7dc230ff73441784f412f9e4a932", "its License.txt: for academic purposes only",
)  # fmt: skip
_FLOW_GRPO = "yifan123/flow_grpo", "ac4c86e8cae021841f1fde853d340e0db67690dd"
_FLOW_REWARDS = (
    *_FLOW_GRPO, "flow_grpo/rewards.py", "18f284f454424e6bc22352e8ac4b51df4246b0169d35ab2f94140621e1608832", "MIT",
)  # fmt: skip
_FLOW_QWENVL = (
    *_FLOW_GRPO, "flow_grpo/qwenvl.py", "90d487021c01a3fea404ac401d45ee104ca07e3f756fd003554bee2aba799dc4", "MIT",
)  # fmt: skip
_PACO_COMMIT = "08caac6f22c174e2c71019d2a4481abf9ad313d2"
_NO_LICENCE = "the repository names none; ask its authors before you redistribute the text"
_PACO_SETS = (
    "X-GenGroup/PaCo-RL", _PACO_COMMIT, "PaCo-GRPO/paco_grpo/rewards/consistency_scorer.py",
    "36bc1998da8fa98f772731e400968f390bd6f8ee5ec6951f3cbcfe7293b761c3", _NO_LICENCE,
)  # fmt: skip
_PACO_EDITS = (
    "X-GenGroup/PaCo-RL", _PACO_COMMIT, "PaCo-GRPO/paco_grpo/rewards/consistency_for_editing.py",
    "2b46f2622d86ee77369b0a4789ccfb2aed271cfec15f43a2848fced4c20d21c6", _NO_LICENCE,
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """Where the question of a shipped template was published."""

    source: tuple[str, str, str, str, str]
    """Repository on GitHub, commit, path, SHA-256 of the file, whose licence holds."""
    symbol: str
    """Name of the function that returns the text, or of the variable that holds it."""
    media: tuple[str, ...]
    """What its client sends before the text, in the same user turn."""
    number: int = 0
    """Which assignment of the variable, in order."""
    formatted: bool = False
    """Whether the client calls str.format, so that doubled braces stand for one."""


_MARKERS = dict.fromkeys(("prompt", "instruction", "main_prompt"), "{prompt}") | {"criteria_text": "{criterion}"}
"""Name in the published texts → marker of our templates."""
_PAIR = ("media_1", "media_2")
_EDITS = ("source", "media_1", "media_2")
_EDIT = ("source", "media_1")
_UNIFIED = "get_unifiedreward_{}_template"
PUBLISHED = {
    "think": Published(_PREF_GRPO, _UNIFIED.format("think_image"), _PAIR, formatted=True),
    "think_video": Published(_PREF_GRPO, _UNIFIED.format("think_video"), _PAIR, formatted=True),
    "flex": Published(_PREF_GRPO, _UNIFIED.format("flex_image"), _PAIR, formatted=True),
    "flex_video": Published(_PREF_GRPO, _UNIFIED.format("flex_video"), _PAIR, formatted=True),
    "edit_pairwise": Published(_PREF_GRPO, _UNIFIED.format("edit_pairwise"), _EDITS, formatted=True),
    "edit_quality": Published(_PREF_GRPO, _UNIFIED.format("edit_pointwise_image_quality"), ("media_1",)),
    "edit_following": Published(_PREF_GRPO, _UNIFIED.format("edit_pointwise_instruction_following"), _EDIT),
    "unifiedreward": Published(_PREF_GRPO, _UNIFIED.format("image"), ("media_1",), formatted=True),
    "unifiedreward_sglang": Published(_FLOW_REWARDS, "question", ("media_1",)),
    "qwenvl": Published(_FLOW_QWENVL, "self.task", ("media_1",)),
    "consistency": Published(_PACO_SETS, "text_prompt", _PAIR, number=1),
    "consistency_no_duplicates": Published(_PACO_SETS, "text_prompt", _PAIR, number=2),
    "consistency_criterion": Published(_PACO_SETS, "text_prompt", _PAIR),
    "edit_consistency": Published(_PACO_EDITS, "consistency_text_prompt", _EDIT),
    "edit_done": Published(_PACO_EDITS, "prompt_following_text_prompt", _EDIT),
}
"""Shipped template → where the question was published that judges of its kind were trained on."""


def template_file(name: str) -> Path:
    """Path of the template with the published question; it need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "prefgrpo" / "prompts" / f"{name}-{PUBLISHED[name].source[3][:8]}.yaml"


def published_template(name: str) -> str:
    """Path of the template with the published question. JudgeError if it was not fetched."""
    file = template_file(name)
    if not file.is_file():
        raise JudgeError(
            f"the template '{name}' has the words of its publisher, on which such judges were trained; they are not in "
            f"{file.parent}: run `prefgrpo judge prompts {name}` (with --from CHECKOUT on a machine without network)"
        )
    return str(file)


def question_of(code: str, row: Published) -> str:
    """The published question with our markers, from the code of the publisher's file."""
    text = published_texts(code, _MARKERS)[row.symbol][row.number]
    if not isinstance(text, str):
        raise JudgeError(f"expected a text as '{row.symbol}' number {row.number + 1}, got {text!r:.80}")
    return text.format_map(_MARKERS) if row.formatted else text


def published_texts(code: str, markers: Mapping[str, str] | None = None) -> dict[str, list[Any]]:
    """{name: values} that a Python file assigns to a name, or returns from the function of this name, in their order;
    those of the module come first. None for a value that is computed.

    Understood are literals, sums, f-strings and names: markers[name], or the latest value of the module's variable.
    Raises SyntaxError.
    """
    known: dict[str, Any] = dict(markers or {})
    values: dict[str, list[Any]] = {}

    def value_of(node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name) | ast.FormattedValue(value=ast.Name(id=name)):
                return known[name]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value_of(left) + value_of(right)
            case ast.JoinedStr(values=parts):
                return "".join(value_of(part) for part in parts)
            case ast.Dict(keys=keys, values=items):
                return {value_of(k): value_of(v) for k, v in zip(keys, items, strict=True) if k is not None}
        return ast.literal_eval(node)

    def note(name: str, node: ast.expr) -> Any:
        found = None
        with suppress(ValueError, KeyError, TypeError):  # computed by something else
            found = value_of(node)
        values.setdefault(name, []).append(found)
        return found

    tree = ast.parse(code)
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for node in sorted(assigned, key=lambda node: (node not in tree.body, node.lineno)):
        name = ast.unparse(node.targets[0])
        found = note(name, node.value)
        if node in tree.body:
            known[name] = found
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for inner in ast.walk(function):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    note(function.name, inner.value)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch the questions that fine-tuned judges were trained on."""
    parser = argparse.ArgumentParser("prefgrpo judge prompts", description=main.__doc__)
    every = "templates, e.g. think flex; none: list them; all: every one"
    parser.add_argument("names", nargs="*", metavar="NAME", help=every)
    checkout = "a checkout's file or folder to take the text from, instead of a download"
    parser.add_argument("--from", dest="source", type=Path, metavar="PATH", help=checkout)
    args = parser.parse_args(argv)
    names: list[str] = args.names
    if not names:
        for name, row in PUBLISHED.items():
            state = "fetched" if template_file(name).is_file() else "not fetched"
            print(f"{name:26} {state:12} {row.source[0]} {row.source[2]}")
        return 0
    videos = [f"{name}_video" for name in names if f"{name}_video" in PUBLISHED]
    for name in PUBLISHED if names == ["all"] else dict.fromkeys([*names, *videos]):
        print(f"{name}: {fetch(name, args.source)}")
        print(f"  from {PUBLISHED[name].source[0]}; licence: {PUBLISHED[name].source[4]}")
    return 0


def fetch(name: str, source: Path | None = None) -> Path:
    """Write the template with the published question; its path. JudgeError if the file is not the expected one.

    source: the publisher's file, or a folder that contains it; None: download it.
    """
    from prefgrpo.judge.template import shipped_templates  # which imports this module

    if name not in PUBLISHED:
        raise JudgeError(
            f"no published question for '{name}'{did_you_mean(name, PUBLISHED)}; there are: {', '.join(PUBLISHED)}"
        )
    row = PUBLISHED[name]
    repository, commit, path, expected, licence = row.source
    if source is None:
        files = [_download(f"https://raw.githubusercontent.com/{repository}/{commit}/{path}")]
    else:
        places = [source] if source.is_file() else source.rglob(Path(path).name)
        files = [place.read_bytes() for place in places]
    code = next((raw for raw in files if hashlib.sha256(raw).hexdigest() == expected), None)
    if code is None:
        raise JudgeError(
            f"{source or 'the download'}: expected {path} of {repository} at commit {commit} (SHA-256 {expected}), "
            f"found {len(files)} file(s) of that name, all with other contents; check out that commit, or leave "
            "--from away to download the file"
        )
    values = dict(shipped_templates()[name])
    values["user"] = "".join(f"{{{medium}}}" for medium in row.media) + question_of(code.decode("utf-8"), row)
    file = template_file(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    note = f"# {path} of {repository} at {commit}; licence: {licence}\n"
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(note + yaml.safe_dump(values, allow_unicode=True, sort_keys=False), encoding="utf-8")
    partial.replace(file)
    return file


@cache
def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=60.0) as reply:
            return bytes(reply.read(1 << 22))
    except OSError as error:
        raise JudgeError(
            f"cannot download {url} ({error}): clone the repository and give the folder, --from CHECKOUT"
        ) from error

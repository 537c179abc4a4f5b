"""Results as JSON, and generated blocks of a document: the text between `<!-- NAME -->` and `<!-- /NAME -->`, which is
never written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def rendered(text: str, name: str, lines: Sequence[str]) -> str:
    """The text with the block's lines replaced. Raises ValueError if a marker is missing."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"expected the marks {start.strip()} and {end.strip()} once each")
    before, _, rest = text.partition(start)
    return before + start + "\n" + "\n".join(lines) + "\n\n" + end + rest.partition(end)[2]


def replace_block(path: Path, name: str, lines: Sequence[str]) -> None:
    """Rewrite one block of a document."""
    path.write_text(rendered(path.read_text(), name, lines))


def rounded(value: Any) -> Any:
    """The value with every float rounded to four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, with one line per list item."""
    lists: list[Any] = []

    def mark(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: mark(v) for key, v in part.items()}
        if isinstance(part, list):
            lists.append(part)
            return f"@{len(lists) - 1}@"
        return part

    text = json.dumps(mark(value), indent=1)
    for k, part in enumerate(lists):
        text = text.replace(f'"@{k}@"', "[\n  " + ",\n  ".join(json.dumps(p) for p in part) + "\n ]")
    path.write_text(text + "\n")

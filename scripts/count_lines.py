"""Lines of the product per folder: `python scripts/count_lines.py` prints the table.

A line counts if it is in a source file of prefgrpo/, kernels/ or csrc/; blank lines and comments count too.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh", ".yaml", ".j2", ".css", ".js", ".sh"}
PRODUCT = ("csrc", "kernels", "prefgrpo")
OTHER = ("tests", "benchmarks", "scripts")


def files(folder: str) -> list[Path]:
    """Source files under `folder`, without data and without prefgrpo/kernels, which is a symlink."""
    found = [p for p in sorted((ROOT / folder).rglob("*")) if p.is_file() and p.suffix in SUFFIXES]
    skipped = ROOT / "prefgrpo" / "kernels"
    return [p for p in found if skipped not in p.parents and not {"assets", "__pycache__"} & set(p.parts)]


def lines(file: Path) -> int:
    """Number of lines in `file`."""
    return len(file.read_text(encoding="utf-8").splitlines())


def counts() -> dict[str, tuple[int, int]]:
    """{folder: (files, lines)} in the order of the table; prefgrpo's subfolders are listed separately."""
    table: dict[str, list[int]] = defaultdict(list)
    for top in PRODUCT + OTHER:
        for file in files(top):
            parts = file.relative_to(ROOT).parts
            table["/".join(parts[:2]) if top == "prefgrpo" and len(parts) > 2 else top].append(lines(file))
    return {folder: (len(sizes), sum(sizes)) for folder, sizes in table.items()}


def table() -> str:
    """The Markdown table."""
    rows = counts()
    sizes = [lines(p) for top in PRODUCT for p in files(top)]
    product = sum(n for folder, (_, n) in rows.items() if folder.split("/")[0] in PRODUCT)
    out = ["| folder | files | lines |", "|---|---:|---:|"]
    out += [f"| `{folder}` | {count} | {total} |" for folder, (count, total) in rows.items()]
    total = f"Product (csrc, kernels, prefgrpo): {product} lines in {len(sizes)} files, median {median(sizes):.0f}."
    return "\n".join([*out, "", total])


if __name__ == "__main__":
    print(table())

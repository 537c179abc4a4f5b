"""Prints the lowest versions that pyproject.toml allows, as constraints for pip.

Of the core and of the extras that train and score, not of the tools in `docs` and `dev`. Needs Python 3.11.

    python scripts/floors.py > floors.txt
"""

import re
from pathlib import Path

import tomllib

EXTRAS = ("train", "judge", "video", "rewards")


def main() -> None:
    """One line per requirement with a floor."""
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + [line for extra in EXTRAS for line in extras[extra]]
    floors = {re.sub(r"^([\w.-]+)>=", r"\1==", line) for line in requirements if ">=" in line}
    print(*sorted(floors, key=str.lower), sep="\n")


if __name__ == "__main__":
    main()

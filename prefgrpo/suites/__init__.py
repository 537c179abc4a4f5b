"""Published evaluation suites: their prompts, the file layout that their own tools expect, and their tables.

Invariant: each suite's module states which numbers are comparable with published ones; scores obtained by other means
than the suite's own are labelled as such.
"""

from __future__ import annotations

from prefgrpo.config.by_path import load_object
from prefgrpo.suites.base import Suite

SUITES: dict[str, str] = {
    "unigenbench": "unigenbench:UniGenBench",
    "geneval2": "geneval2:GenEval2",
    "geneval": "geneval:GenEval",
    "imgedit": "imgedit:ImgEdit",
    "vbench": "vbench:VBench",
}


def load_suite(name: str) -> Suite:
    """The suite of that name."""
    suite: Suite = load_object(f"prefgrpo.suites.{SUITES[name]}")()
    return suite

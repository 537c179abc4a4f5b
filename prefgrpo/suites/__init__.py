"""Published evaluation suites: their prompts, the layout of files that their own tools read, and their tables.

Invariant: a suite's module says what of its numbers is comparable with published ones; what is scored here by other
means than the suite's own is labelled so.
"""

from __future__ import annotations

from importlib import import_module
from typing import Literal

from prefgrpo.suites.base import Suite

Name = Literal["unigenbench", "geneval", "vbench", "dpg", "t2i_compbench"]
SUITES: dict[str, str] = {
    "unigenbench": "unigenbench:UniGenBench",
    "geneval": "geneval:GenEval",
    "vbench": "vbench:VBench",
    "dpg": "dpg:Dpg",
    "t2i_compbench": "t2i_compbench:T2ICompBench",
}


def load_suite(name: str) -> Suite:
    """The suite of that name."""
    module, _, attribute = SUITES[name].partition(":")
    suite: Suite = getattr(import_module(f"prefgrpo.suites.{module}"), attribute)()
    return suite

"""Locates checkouts of the peers for tests that run their real code: PREFGRPO_PEERS=folder, with one folder per peer.

None of their code is in this repository. Without a checkout, or in another version, a comparison is skipped; in the
version that we compared with (COMMITS, which docs/ops.md names) one that cannot be made fails.
"""

import ast
import importlib
import importlib.util
import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDERS = {
    "flow_grpo": "flow_grpo",
    "dance_grpo": "DanceGRPO",
    "pref_grpo": "Pref-GRPO",
    "flow_factory": "Flow-Factory/src",
    "verl_omni": "verl-omni",
    "paco": "PaCo-RL/PaCo-GRPO",
    "geneval2": "GenEval2",
    "imgedit": "ImgEdit",
    "unirl": "UniRL",
    "mix_grpo": "MixGRPO",
}
COMMITS = {
    "flow_grpo": "9745241",
    "dance_grpo": "15cc71d",
    "pref_grpo": "3e787f6",
    "flow_factory": "a0b2bc5",
    "verl_omni": "a1139ba",
    "unirl": "1a7b501",
    "mix_grpo": "e5cdd6a",
}
"""Of the codebases whose functions docs/ops.md replaces."""
OURS = {"out_dtype", "want_mean"}
"""Parameters that our functions have beside the peer's."""


def folder(codebase):
    """Checkout of a peer; skips the test if there is none."""
    root = os.environ.get("PREFGRPO_PEERS")
    if not root:
        pytest.skip("PREFGRPO_PEERS is not set: no checkout of the peers to compare with")
    path = Path(root) / FOLDERS[codebase]
    if not path.is_dir():
        pytest.skip(f"no checkout of {codebase}: expected {path}")
    return path


def module(codebase, name, monkeypatch):
    """Import one of the peer's modules under its own name; it leaves sys.modules after the test."""
    path = str(folder(codebase))
    before = set(sys.modules)
    monkeypatch.syspath_prepend(path)
    try:
        imported = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(name.split(".")[0]):
            raise
        other_version(codebase, f"has no module {error.name}")
    for new in [m for m in set(sys.modules) - before if m.split(".")[0] == name.split(".")[0]]:
        monkeypatch.setitem(sys.modules, new, sys.modules.pop(new))
    return imported


def other_version(codebase, what):
    """Skip the test: the checkout is not the version that we compared with. If it is, fail."""
    command = ["git", "-C", str(folder(codebase)), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True).stdout
    if codebase in COMMITS and head.startswith(COMMITS[codebase]):
        pytest.fail(f"{codebase} is at {COMMITS[codebase]}, which is to be compared with, and {what}")
    pytest.skip(f"another version of {codebase}: it {what}; docs/ops.md names the commit")


def same_parameters(codebase, theirs, ours):
    """Skip unless the peer's function takes all parameters of its documented version, which ours replicates."""
    lacking = inspect.signature(ours).parameters.keys() - inspect.signature(theirs).parameters.keys() - OURS
    if lacking:
        other_version(codebase, f"calls {theirs.__name__} without {', '.join(sorted(lacking))}")


def functions(codebase, file, module_name, monkeypatch):
    """A module with only the top-level functions of a peer's trainer, whose imports are not all installed here."""
    made, path = ModuleType(module_name), folder(codebase) / file
    define(made, path, [n for n in ast.parse(path.read_bytes()).body if not getattr(n, "decorator_list", None)])
    monkeypatch.setitem(sys.modules, module_name, made)
    return made


def methods(codebase, file, *names, **scope):
    """Methods of a peer's classes as plain functions of `self`; scope: what they take from their module."""
    made, path = ModuleType(file), folder(codebase) / file
    vars(made).update(scope)
    define(made, path, [n for n in ast.walk(ast.parse(path.read_bytes())) if getattr(n, "name", "") in names])
    return [getattr(made, name) for name in names]


def define(made, path, nodes):
    """Run those of the nodes that are functions in a module, without decorators and annotations."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in functions:
        node.decorator_list, node.returns = [], None
        for arg in [*node.args.args, *node.args.kwonlyargs]:
            arg.annotation = None
    vars(made).update(torch=torch, math=math)
    exec(compile(ast.fix_missing_locations(ast.Module(functions, [])), path, "exec"), vars(made))


def file_module(codebase, file, module_name, monkeypatch):
    """One file of the peer as a module, without its package's __init__."""
    path = folder(codebase) / file
    if not path.is_file():
        other_version(codebase, f"has no {file}")
    spec = importlib.util.spec_from_file_location(module_name, path)
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module_name, made)
    spec.loader.exec_module(made)
    return made

"""Finds checkouts of the peers for tests that run their real code: PREFGRPO_PEERS=folder, with one folder per peer.

None of their code is in this repository. docs/integrations.md says which commits the comparison was made with.
"""

import ast
import importlib
import importlib.util
import math
import os
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
    "paco": "PaCo-RL/PaCo-GRPO",
}


def folder(codebase):
    """Checkout of a peer; skips the test where there is none."""
    root = os.environ.get("PREFGRPO_PEERS")
    if not root:
        pytest.skip("PREFGRPO_PEERS is not set: no checkout of the peers to compare with")
    path = Path(root) / FOLDERS[codebase]
    if not path.is_dir():
        pytest.skip(f"no checkout of {codebase}: expected {path}")
    return path


def module(codebase, name, monkeypatch):
    """Import one of the peer's modules by its own name; forgotten again after the test."""
    path = str(folder(codebase))
    before = set(sys.modules)
    monkeypatch.syspath_prepend(path)
    imported = importlib.import_module(name)
    for new in [m for m in set(sys.modules) - before if m.split(".")[0] == name.split(".")[0]]:
        monkeypatch.setitem(sys.modules, new, sys.modules.pop(new))
    return imported


def functions(codebase, file, module_name, monkeypatch):
    """A module of the peer's top-level functions alone, for trainers that import what is not installed here."""
    source = (folder(codebase) / file).read_text(encoding="utf-8")
    tree = ast.parse(source)
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.decorator_list]
    made = ModuleType(module_name)
    made.__dict__.update(torch=torch, math=math)
    for node in tree.body:
        node.returns = None
        for arg in node.args.args:
            arg.annotation = None
    exec(compile(ast.fix_missing_locations(tree), file, "exec"), made.__dict__)
    monkeypatch.setitem(sys.modules, module_name, made)
    return made


def file_module(codebase, file, module_name, monkeypatch):
    """One file of the peer as a module, without its package's __init__."""
    spec = importlib.util.spec_from_file_location(module_name, folder(codebase) / file)
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module_name, made)
    spec.loader.exec_module(made)
    return made

"""Structure of the code: which module may import which, and what every file must say.

Each case is a rule of docs/design.md that a linter cannot check; `make lint` checks the layers.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import count_lines  # noqa: E402

PYTHON = [
    p for top in ("prefgrpo", "kernels", "benchmarks", "scripts") for p in count_lines.files(top) if p.suffix == ".py"
]
PACKAGE = [p for p in PYTHON if p.is_relative_to(ROOT / "prefgrpo")]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
DECLARED = {re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r'"([A-Za-z][\w.-]*)>=', PYPROJECT)}
DISTRIBUTIONS = {
    "PIL": "pillow", "yaml": "pyyaml", "open_clip": "open-clip-torch", "markupsafe": "jinja2",
    "tokenizers": "transformers", "huggingface_hub": "transformers",
}  # fmt: skip
"""Import name → name in pyproject.toml (or of the package that pulls it in), where they differ."""
OPTIONAL = {"vllm", "wandb", "pyarrow", "verl_omni"}
"""Optional packages that are not declared; the code that uses one asks for it by name."""


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(module: ast.AST) -> set[str]:
    """Dotted names of everything a module imports, at top level or nested."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_torch_distributed_in_judges_and_rewards():
    """Judges and rewards also run in separate processes, which have no process group."""
    users = {p.relative_to(ROOT) for p in PACKAGE if any(n.startswith("torch.distributed") for n in imports(tree(p)))}
    assert Path("prefgrpo/parallel/world.py") in users, "the check finds no user of torch.distributed at all"
    assert not [p for p in users if p.parts[1] in ("judge", "rewards", "ops", "models")]


def test_every_import_is_a_declared_dependency():
    """Every import is declared in pyproject.toml: nothing works only because a test dependency pulled it in."""
    used = {name.split(".")[0] for file in PACKAGE for name in imports(tree(file))} - sys.stdlib_module_names
    missing = {n for n in used - OPTIONAL - {"prefgrpo"} if DISTRIBUTIONS.get(n, n) not in DECLARED}
    assert {"torch", "diffusers", "aiohttp"} <= DECLARED and not missing


def test_constraints_pin_every_direct_dependency():
    names = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert DECLARED - {re.sub(r"[-_.]+", "-", name).lower() for name in names} == set()


def test_kernels_folder_is_no_package():
    """With an __init__.py it would shadow the Hugging Face `kernels` library if the working directory is the root."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "prefgrpo" / "kernels").resolve() == ROOT / "kernels"

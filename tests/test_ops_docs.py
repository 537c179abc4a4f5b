"""The example in docs/ops.md runs unchanged on every backend, and is as short as the page claims."""

import re

import pytest
from ops_cases import DEVICE, each_backend, serve

import prefgrpo.ops


def example(root) -> str:
    return re.findall(r"```python\n(.*?)```", (root / "docs" / "ops.md").read_text(), re.DOTALL)[0]


@each_backend
def test_the_foreign_loop_runs(backend, root):
    if DEVICE != "cpu":
        pytest.skip("the example is written for the CPU")
    scope = {}
    with serve(backend):
        exec(compile(example(root), "docs/ops.md", "exec"), scope)
    assert scope["advantage"].abs().max() > 0


def test_it_has_at_most_forty_lines_of_code(root):
    code = [line for line in example(root).splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= 40


def test_every_public_op_is_in_the_table(root):
    text = (root / "docs" / "ops.md").read_text()
    public = [name for name in prefgrpo.ops.__all__ if name.islower()]
    assert [name for name in public if f"`{name}`" not in text and f"`{name}(" not in text] == []

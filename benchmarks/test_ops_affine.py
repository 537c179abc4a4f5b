"""affine_step with noise given."""

from collections.abc import Callable

import pytest

from benchmarks.cases import step_given


@pytest.mark.parametrize("variant", ["ours", "ours, out=", "eager", "compile"])
def test_affine_step(timed: Callable, latents: tuple, variant: str) -> None:
    inputs, with_compile = latents
    timed(step_given(inputs, with_compile and variant == "compile"), variant)

"""affine_step with addressed noise, and the noise alone."""

from collections.abc import Callable

import pytest

from benchmarks.cases import step_addressed


@pytest.mark.parametrize("variant", ["ours", "eager", "compile", "noise alone", "randn alone"])
def test_addressed_noise(timed: Callable, latents: tuple, variant: str) -> None:
    inputs, with_compile = latents
    timed(step_addressed(inputs, with_compile and variant == "compile"), variant)

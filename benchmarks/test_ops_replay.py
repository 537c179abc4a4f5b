"""affine_logp, forward and backward."""

from collections.abc import Callable

import pytest

from benchmarks.cases import replay


@pytest.mark.parametrize("variant", ["ours", "eager", "compile"])
def test_replay(timed: Callable, latents: tuple, variant: str) -> None:
    inputs, with_compile = latents
    timed(replay(inputs, with_compile and variant == "compile"), variant)

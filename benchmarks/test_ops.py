"""Every case of `make bench`: the small ops, and the ops on latents at each of their shapes."""

from collections.abc import Callable

import pytest

from benchmarks.cases import replay, small_policy, small_winrate, step_addressed, step_given

SMALL = {
    small_policy: ("ours", "eager"),
    small_winrate: ("ours", "eager"),
}
LATENTS = {
    step_given: ("ours", "ours, out=", "eager", "compile"),
    step_addressed: ("ours", "eager", "compile", "noise alone", "randn alone"),
    replay: ("ours", "eager", "compile"),
}


def variants(cases: dict) -> pytest.MarkDecorator:
    """Parametrises over all cases and their variants."""
    each = [pytest.param(build, v, id=f"{build.__name__}-{v}") for build, names in cases.items() for v in names]
    return pytest.mark.parametrize(("build", "variant"), each)


@variants(SMALL)
def test_small(timed: Callable, device: str, build: Callable, variant: str) -> None:
    timed(build(48, 24, device), variant)


@variants(LATENTS)
def test_latents(timed: Callable, latents: tuple, build: Callable, variant: str) -> None:
    inputs, with_compile = latents
    timed(build(inputs, with_compile and variant == "compile"), variant)

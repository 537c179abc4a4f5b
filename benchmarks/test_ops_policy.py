"""policy_loss with metrics and gradient."""

from collections.abc import Callable

import pytest

from benchmarks.cases import small_policy


@pytest.mark.parametrize("variant", ["ours", "eager", "eager, one batch"])
def test_policy_loss(timed: Callable, device: str, variant: str) -> None:
    timed(small_policy(48, 24, device), variant)

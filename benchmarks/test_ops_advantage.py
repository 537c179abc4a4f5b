"""winrate_advantage and group_advantage."""

from collections.abc import Callable

import pytest

from benchmarks.cases import small_group, small_winrate


@pytest.mark.parametrize("variant", ["ours", "eager"])
def test_winrate_advantage(timed: Callable, device: str, variant: str) -> None:
    timed(small_winrate(48, 24, device), variant)


@pytest.mark.parametrize("variant", ["ours", "eager"])
def test_group_advantage(timed: Callable, device: str, variant: str) -> None:
    timed(small_group(48, 24, device), variant)

"""One reward as the registry test runs it; the parts `reward_cases_*.py` list them by name."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefgrpo.rewards.base import Sample


@dataclass(frozen=True)
class Case:
    """How to make a reward without downloads, and what to score with it."""

    options: Callable[[Path], dict[str, Any]]
    """Its options, after a tiny checkpoint was made in the folder (or a server started)."""
    samples: Callable[[], list[Sample]]
    """What it scores."""
    group: bool = False
    """Whether the samples are one prompt's group."""
    needs: str = ""
    """Library that some Pythons lack; without it the case is skipped."""

"""Every reward of the registry, ready to run: the parts that their engineers keep, as one table."""

import reward_cases_clip
import reward_cases_own
import reward_cases_serve
import reward_cases_vlm
from reward_case import Case

PARTS = (reward_cases_serve, reward_cases_clip, reward_cases_vlm, reward_cases_own)
CASES: dict[str, Case] = {name: case for part in PARTS for name, case in getattr(part, "CASES", {}).items()}

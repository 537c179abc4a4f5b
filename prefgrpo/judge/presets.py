"""Judge models that are known by a short name: where they lie, how they answer, what they need.

Invariant: a preset's template suits the model's own answer format; UnifiedReward sizes share one entry each, so that
`unifiedreward-think-32b` differs from `unifiedreward-think-8b` in its weights only. A name without a size is the 8b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Engine = Literal["vllm", "sglang"]
FRAMES = 16
"""Images of a request that compares two clips of 8 frames: the most that any shipped template sends."""


@dataclass(frozen=True)
class Preset:
    """A known judge model."""

    model: str
    """Hub id."""
    template: str
    """Template of two media that suits its answers; the probe at the start asks with it."""
    max_model_len: int = 16384
    """Longest prompt with answer, in tokens."""
    images: int = FRAMES
    """Most images per request."""
    engine: Engine = "vllm"
    """Engine that serves it, unless another is asked for."""
    chat_template: str = ""
    """Name of SGLang's own chat template, for a checkpoint without one."""


def _sizes(name: str, hub: str, template: str, sizes: tuple[str, ...]) -> dict[str, Preset]:
    """`name` for the 8b and `name`-SIZE for each size."""
    found = {f"{name}-{size}": Preset(hub.format(size), template) for size in sizes}
    return {name: found[f"{name}-8b"], **found}


_QWEN3_VL = ("2b", "4b", "8b", "32b")
PRESETS: dict[str, Preset] = {
    **_sizes("unifiedreward", "CodeGoat24/UnifiedReward-2.0-qwen3vl-{}", "compare", _QWEN3_VL),
    **_sizes("unifiedreward-think", "CodeGoat24/UnifiedReward-Think-qwen3vl-{}", "think", _QWEN3_VL),
    **_sizes("unifiedreward-flex", "CodeGoat24/UnifiedReward-Flex-qwen3vl-{}", "flex", ("8b",)),
    **_sizes("unifiedreward-edit", "CodeGoat24/UnifiedReward-Edit-qwen3vl-{}", "edit_pairwise", _QWEN3_VL),
    "unifiedreward-1.5": Preset(
        "CodeGoat24/UnifiedReward-7b-v1.5", "compare", 8192, 2, engine="sglang", chat_template="chatml-llava"
    ),
    "paco-reward": Preset("X-GenGroup/PaCo-Reward-7B", "consistency"),
    "qwen3-vl": Preset("Qwen/Qwen3-VL-8B-Instruct", "compare"),
    "qwen2.5-vl": Preset("Qwen/Qwen2.5-VL-7B-Instruct", "compare"),
}

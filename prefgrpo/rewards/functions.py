"""Python functions as rewards.

    def redness(images, prompts, **columns) -> list[float | None]    one number per sample, None: missing
    def closer(prompt, image_a, image_b) -> float | None             P(image_a is better); the reward is the win rate

docs/extend.md says what they get and may return. Invariant: the returned values are used unchanged, and samples on
which the function fails are missing, with a reason.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from inspect import Parameter
from numbers import Real
from typing import Any, cast

from prefgrpo.data.answer import Answer
from prefgrpo.rewards.base import Question, Reward, RewardError, Sample, answers_of
from prefgrpo.rewards.pairs import Compares

Function = Callable[..., Any]
POINTWISE, PAIRWISE = ("images", "prompts"), ("prompt", "image_a", "image_b")
"""Names of the first parameters of the two kinds of functions."""


class FunctionReward(Reward):
    """A function of images and prompts."""

    takes = ("image", "video")
    of_function = True

    def __init__(self, function: Function, **options: Any) -> None:
        """function: (images, prompts, **columns) -> a number or None per sample, see above. options: values for its
        parameters that have a default."""
        self.function = function
        self.options = options
        self.name = _name(function)
        self._any_column = any(p.kind is Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())

    def ask(self, asked: list[Question]) -> list[Answer]:
        """Call the function once. RewardError unless it returns one number or None per sample."""
        samples = [sample for (sample,) in asked]
        columns = {key for s in samples for key in s.meta} if self._any_column else self.meta_keys
        given = {key: [s.meta.get(key) for s in samples] for key in columns if key not in (*POINTWISE, "sources")}
        if self.needs_source:
            given["sources"] = [[m.pixels.copy() for m in s.source] for s in samples]
        images = [s.media.pixels.copy() for s in samples]
        prompts = [s.prompt for s in samples]
        values = self.function(images, prompts, **given | self.options)
        if not isinstance(values, Mapping):
            return [self._scored(v, {}) for v in self._numbers(values, len(samples))]
        if not values or not all(isinstance(name, str) for name in values):
            raise RewardError(f"{self.name} must return a mapping from names to numbers, got {values!r:.80}")
        rows = zip(*(self._numbers(column, len(samples)) for column in values.values()), strict=True)
        return [self._scored(None if None in row else sum(row), dict(zip(values, row, strict=True))) for row in rows]

    def _numbers(self, values: Any, count: int) -> list[float | None]:
        """What the function returned, as `count` numbers; RewardError if it is anything else."""
        given = values.tolist() if hasattr(values, "tolist") else values  # an array or tensor
        if not isinstance(given, list | tuple) or not all(value is None or _is_number(value) for value in given):
            raise RewardError(f"{self.name} must return one number or None per sample, got {values!r:.80}")
        if len(given) != count:
            raise RewardError(f"{self.name} must return one value per sample: {count}, got {len(given)}")
        return [None if value is None else float(value) for value in given]

    def _scored(self, value: float | None, parts: dict[str, float | None]) -> Answer:
        known = {name: part for name, part in parts.items() if part is not None}
        return Answer(value, f"{self.name} returned None" if value is None else "", known)


class FunctionPairs(Compares):
    """The win rate under a function that compares two images."""

    takes = ("image", "video")
    of_function = True

    def __init__(self, function: Function, **options: Any) -> None:
        """function: (prompt, image_a, image_b) -> P(image_a is better) in [0, 1], or None. options: of Compares."""
        self.function = function
        self.name = _name(function)
        super().__init__(**options)

    def ask(self, asked: list[Question]) -> list[Answer]:
        """The function's result for each pair; missing, with a reason, if it raises or returns no probability."""
        return [self._one(*samples) for samples in asked]

    def _one(self, first: Sample, second: Sample) -> Answer:
        start = time.perf_counter()
        try:
            value = self.function(first.prompt, first.media.pixels.copy(), second.media.pixels.copy())
            if value is None:
                return Answer(None, f"{self.name} returned None")
            if not _is_number(value) or not 0 <= float(value) <= 1:
                raise ValueError(f"expected a probability in [0, 1], got {value!r:.80}")
        except Exception as error:  # noqa: BLE001  (whatever a user's function raises)
            return Answer(None, f"{self.name} raised {type(error).__name__}: {str(error)[:200]}")
        return Answer(float(value), seconds=time.perf_counter() - start)


def failure(reward: Reward, sample: Sample) -> str:
    """What is wrong with a function, asked twice about this sample: it raises, or returns something other than one
    value or None per question; '' if nothing is."""
    samples = (sample, sample) if reward.compares else (sample,)
    try:
        reason = answers_of(reward, [samples, samples])[0].reason
    except Exception as error:  # noqa: BLE001  (whatever a user's function raises)
        return str(error) if isinstance(error, RewardError) else f"it raised {type(error).__name__}: {error}"
    return "" if reason.endswith("returned None") else reason


def function_class(function: Function) -> type[Reward]:
    """A reward class made from a function; its constructor takes the function's options.

    RewardError if it is not a function, or has other parameters.
    """
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError) as error:  # not a function, or a builtin
        raise RewardError(f"a reward function must have a signature: {error}") from error
    members: dict[str, Any] = {"__doc__": inspect.getdoc(function), "__module__": function.__module__}
    kind: type[Reward] = FunctionPairs if first == PAIRWISE[0] else FunctionReward
    if kind is FunctionPairs:
        _parameters(function, PAIRWISE)
        options = list(inspect.signature(Compares).parameters.values())
    else:
        own = _parameters(function, POINTWISE)
        options = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own.values() if p.default is not Parameter.empty]
        columns = tuple(key for key in own if key != "sources" and own[key].default is Parameter.empty)
        members |= {"needs_source": "sources" in own, "meta_keys": columns}
    members["__signature__"] = inspect.Signature(options)
    members["__init__"] = lambda self, **given: kind.__init__(self, function, **given)  # type: ignore[call-arg]
    return cast("type[Reward]", type(_name(function), (kind,), members))


def _parameters(function: Function, first: tuple[str, ...]) -> dict[str, Parameter]:
    """The parameters after the leading ones in `first`; RewardError if the function does not begin with these."""
    parameters = inspect.signature(function).parameters
    if tuple(parameters)[: len(first)] != first:
        raise RewardError(
            f"a reward function takes ({', '.join(POINTWISE)}, …) or ({', '.join(PAIRWISE)}); {_name(function)} takes "
            f"({', '.join(parameters)})"
        )
    rest = {name: p for name, p in parameters.items() if name not in first}
    return {name: p for name, p in rest.items() if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}


def _is_number(value: Any) -> bool:
    """Whether it is a number, also of NumPy or torch; a text of digits is not."""
    return isinstance(value.item() if getattr(value, "shape", None) == () else value, Real)


def _name(function: Function) -> str:
    return str(getattr(function, "__name__", type(function).__name__))

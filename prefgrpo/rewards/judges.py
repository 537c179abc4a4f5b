"""Opens judges and clients for rewards, from an open one, a JudgeConfig, or a mapping of its non-default fields.
Invariant: the server is checked before anything is opened; a JudgeError within seconds says what to do otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prefgrpo.config.loading import section
from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge.verdict import JudgeError, PairJudge

if TYPE_CHECKING:
    from prefgrpo.judge.client import JudgeClient


def open_judge(judge: JudgeConfig | Mapping[str, Any], template: str) -> PairJudge:
    """Open a pairwise judge. JudgeError, with advice, if it gives no verdicts; ConfigError for invalid fields."""
    config = _config(judge)
    if config.backend == "local":
        from prefgrpo.judge.local import LocalJudge  # imports transformers

        return LocalJudge(config.model, template)
    from prefgrpo.judge.check import check  # imports aiohttp
    from prefgrpo.judge.client import HttpJudge

    check(config, template)
    return HttpJudge(config, template)


def open_client(judge: Any) -> JudgeClient:
    """A client for any question.

    Raises JudgeError within seconds if no reachable server serves the model. Call the client's `close` when done.
    """
    from prefgrpo.judge.check import check_reachable
    from prefgrpo.judge.client import HttpJudge, JudgeClient, shared_client

    if isinstance(judge, JudgeClient):
        judge.users += 1
        return judge
    if isinstance(judge, HttpJudge):
        return shared_client(judge.config)
    config = _config(judge)
    if config.backend == "local":
        raise JudgeError(
            "this reward asks other questions than which of two images is better, which a judge in this process "
            "cannot answer: serve one, and set judge.backend: http, judge.endpoints, and judge.model (its name, or "
            "empty)"
        )
    check_reachable(config)
    return shared_client(config)


def _config(judge: JudgeConfig | Mapping[str, Any]) -> JudgeConfig:
    return judge if isinstance(judge, JudgeConfig) else section(JudgeConfig, judge, "judge")

"""Judges and clients for the rewards that ask one: an open one, its JudgeConfig, or a mapping of fields that differ
from the defaults. Invariant: what is opened here was reached first, within seconds, or a JudgeError says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge.verdict import JudgeError, PairJudge

if TYPE_CHECKING:
    from prefgrpo.judge.http import Client


def open_judge(judge: JudgeConfig | Mapping[str, Any], template: str = "", device: str = "cpu") -> PairJudge:
    """An open judge of pairs. Raises JudgeError with what to do if it gives no verdicts, ConfigError for bad fields.

    template: what it asks with if `judge` names none. device: of a judge in this process.
    """
    config = _config(judge, template)
    if config.backend == "local":
        from prefgrpo.judge.local import LocalJudge  # imports transformers

        return LocalJudge(config.model, config.template, device)
    from prefgrpo.judge import client  # imports aiohttp

    client.check(config)
    return client.HttpJudge(config)


def open_client(judge: Any, template: str) -> tuple[Client, str]:
    """(client for any question, name of the template to ask with); `template`: the name if `judge` names none.

    Raises JudgeError within seconds if no server is there that serves the model. `close` the client when done.
    """
    from prefgrpo.judge import client  # imports aiohttp
    from prefgrpo.judge.http import Client, HttpJudge, shared_client

    if isinstance(judge, Client):
        judge.users += 1
        return judge, template
    if isinstance(judge, HttpJudge):  # its template compares pairs
        return shared_client(judge.config), template
    config = _config(judge, template)
    if config.backend == "local":
        raise JudgeError(
            "this reward asks more than which of two is better, which a judge in this process cannot answer: "
            "serve one, and set judge.backend to http, judge.endpoints, and judge.model to its name or nothing"
        )
    client.reach(config)
    return shared_client(config), config.template


def _config(judge: JudgeConfig | Mapping[str, Any], template: str) -> JudgeConfig:
    config = judge if isinstance(judge, JudgeConfig) else JudgeConfig().override(judge)
    return replace(config, template=config.template or template)

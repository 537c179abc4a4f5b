"""Judges and clients for the rewards that ask one, from whatever names them.

What names them: an open judge, its config, or a mapping of the config's fields with `backend`. Invariant: what is
opened here was reached first, within seconds, or a JudgeError says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from prefgrpo.judge.verdict import JudgeError, PairJudge

if TYPE_CHECKING:
    from prefgrpo.judge.http import Client


def open_judge(config: Any, check: bool = True, template: str = "") -> PairJudge:
    """An open judge from `HttpJudgeConfig`, `LocalJudgeConfig`, or a mapping of one's fields with `backend`.

    check: make sure first, within seconds, that it gives verdicts. Raises JudgeError with what to do if it does not.
    template: what it asks with if the config names none.
    """
    config = _config_from(config, template)
    if type(config).__name__ == "LocalJudgeConfig":
        from prefgrpo.judge.local import LocalJudge  # imports transformers

        return LocalJudge(config)
    from prefgrpo.judge import client  # imports aiohttp

    if check:
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
    config = _config_from(judge, template)
    if not isinstance(config, client.HttpJudgeConfig):
        raise JudgeError("this reward asks other questions than which of two is better: it needs a judge over http")
    client.reach(config)
    return shared_client(config), config.template


def _config_from(judge: Any, template: str) -> Any:
    """A config with a template, if there is one; JudgeError for options that it has not."""
    if isinstance(judge, Mapping):
        options = dict(judge)
        backend = options.pop("backend", "http")
        if backend not in ("http", "local"):
            raise JudgeError(f"judge backend must be 'http' or 'local', got {backend!r}")
        if backend == "local":
            from prefgrpo.judge.local import LocalJudgeConfig as Config
        else:
            from prefgrpo.judge.client import HttpJudgeConfig as Config  # type: ignore[assignment]
        known = [f.name for f in fields(Config)]
        if unknown := sorted(set(options) - set(known)):
            raise JudgeError(f"unknown option(s) {unknown} for the {backend} judge; expected {', '.join(known)}")
        if template and not options.get("template"):
            options["template"] = template
        return Config(**options)
    if type(judge).__name__ == "HttpJudgeConfig":
        return replace(judge, template=judge.template or template)
    if type(judge).__name__ != "LocalJudgeConfig":
        raise JudgeError(f"expected an HttpJudgeConfig, a LocalJudgeConfig or a mapping, got {type(judge).__name__}")
    return judge

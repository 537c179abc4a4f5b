"""`prefgrpo judge check`: says in seconds whether a judge will work, and how it answers.

The work is `judge.client.check`; this prints its summary and lets its JudgeError through.
"""

from __future__ import annotations

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge import client


def check(
    endpoint: tuple[str, ...] = ("http://127.0.0.1:8000",),
    model: str = "",
    template: str = "compare",
    tokenizer: str = "",
    api_key_env: str = "",
    bias_pairs: int = 8,
    timeout_s: float = 20.0,
) -> int:
    """Is the judge there, does it serve the model, does it answer a pair, are its known answers right?

    Known answers: which of two pictures, or a picture and noise, is the plain colour of the caption. A judge that
    always says the same, or mixes the pictures up, fails by name (with a template of your own: exit code 1).

    Args:
        endpoint: OpenAI-compatible servers, with or without /v1.
        model: Served model name; empty: the only one served.
        template: Shipped template name or path to one.
        tokenizer: Folder or hub id of the judge's tokenizer, for exact label ids.
        api_key_env: Environment variable that holds the API key.
        bias_pairs: Random pairs to judge in both orders for the position bias; 0 for none.
        timeout_s: Longest wait for one answer, in seconds.
    """
    config = JudgeConfig(endpoint, model, template, tokenizer, api_key_env=api_key_env)
    health = client.check(config, timeout_s=timeout_s, bias_pairs=bias_pairs, known=True)
    print(health.summary())
    return 1 if health.alarm else 0

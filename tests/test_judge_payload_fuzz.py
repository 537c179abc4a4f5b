"""Any payload of a judge server: the client neither crashes nor takes it for a verdict by accident.

Hypothesis puts arbitrary JSON at an arbitrary place of a good chat completion, and cuts it anywhere. Oracle: a verdict
is in [0, 1], has labels' log-probabilities behind it where it is soft, and is no verdict where words are asked for.
"""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_server import JudgeServer, completion
from test_judge_faults import ask, judge, missing

from prefgrpo.judge.answers import Unreadable
from prefgrpo.judge.http import first_choice, read
from prefgrpo.judge.send import message_of
from prefgrpo.judge.template import load_template
from prefgrpo.judge.verdict import Answer

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    LEAVES | st.sampled_from(["1", "2", "Image 1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
GOOD = completion(3.0)


def places(value, at=()):
    """Every path into a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, item in inner for path in places(item, (*at, key)))]


def replaced(value, path, new):
    """`value` with `new` at `path`."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", ["compare", "think", "flex", "edit_pairwise", "consistency"])
@given(path=st.sampled_from(places(GOOD)), new=JSON, cut=st.integers(0, 2000))
@settings(max_examples=100)
def test_no_payload_crashes_the_client_or_becomes_a_verdict_by_accident(name, path, new, cut):
    payload = json.dumps(replaced(GOOD, path, new)).encode()[: cut or None]
    try:
        answer = read(load_template(name), first_choice("http://x", payload)[0], Answer(None), 0.01)
    except Unreadable as error:
        assert str(error)
        return
    if answer.value is None:
        assert answer.reason
        return
    assert 0.0 <= answer.value <= 1.0
    if name == "compare":  # "1" states a verdict where words are asked for
        tops = json.loads(payload)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert all(float(top["logprob"]) <= 0.01 for top in tops if str(top["token"]).strip() in ("1", "2"))


@given(st.binary(max_size=300) | JSON.map(lambda v: json.dumps(v).encode()))
def test_any_refusal_has_a_message(payload):
    assert isinstance(message_of(payload), str)


def test_log_probabilities_that_are_no_numbers_are_missing():
    with JudgeServer("nan") as server:
        for server.logprob in (math.nan, math.inf, -math.inf, "NaN", "x", None, 3.0, [], {}, True, 1e400):
            missing(ask(judge(server.url)), "prob")

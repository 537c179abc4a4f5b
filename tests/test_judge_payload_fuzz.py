"""Any payload of a judge server: the client neither crashes nor takes it for a verdict by accident.

Hypothesis puts arbitrary JSON at an arbitrary place of a good chat completion, and cuts it anywhere. Oracle: a verdict
is in [0, 1], has labels' log-probabilities behind it where it is soft, and is no verdict where words are asked for.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_server import completion

from prefgrpo.judge.answers import Unreadable
from prefgrpo.judge.http import first_choice, read
from prefgrpo.judge.send import message_of
from prefgrpo.judge.template import load_template
from prefgrpo.judge.verdict import Answer

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1", "2", "Image 1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


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


GOOD = completion(3.0)


@pytest.mark.parametrize("name", ["compare", "think", "flex", "edit_pairwise", "consistency"])
@given(path=st.sampled_from(places(GOOD)), new=JSON, cut=st.integers(0, 2000))
@settings(max_examples=400)
def test_no_payload_crashes_the_client_or_becomes_a_verdict_by_accident(name, path, new, cut):
    payload = json.dumps(replaced(GOOD, path, new)).encode()[: cut or None]
    try:
        found = read(load_template(name), first_choice("http://x", payload)[0], Answer(None), 0.01)
    except Unreadable as error:
        assert str(error)
        return
    if found.value is None:
        assert found.reason
        return
    assert 0.0 <= found.value <= 1.0
    if name != "compare":  # "1" states a verdict where words are asked for
        return
    tops = json.loads(payload)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert all(float(top["logprob"]) <= 0.01 for top in tops if str(top["token"]).strip() in ("1", "2"))


@given(st.binary(max_size=300) | JSON.map(lambda v: json.dumps(v).encode()))
@settings(max_examples=300)
def test_any_refusal_has_a_message(payload):
    assert isinstance(message_of(payload), str)

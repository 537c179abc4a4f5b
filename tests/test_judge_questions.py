"""Any question to a judge behind HTTP: texts by name, several media, source images, every kind of answer.

Why these cases: a source that travels in the wrong place, a picture that is asked twice, or an answer that is shared
by questions that differ gives a wrong reward without a message. The server decodes the pictures and answers from
their brightness.
"""

import asyncio
import math
import time

import numpy as np
import pytest
from judge_server import JudgeServer, images, text_of

from prefgrpo.data.media import Media
from prefgrpo.judge.http import Client, HttpJudge, HttpJudgeConfig, shared_client
from prefgrpo.judge.local import LocalJudge, LocalJudgeConfig
from prefgrpo.judge.send import SendConfig, Sender, SendError
from prefgrpo.judge.template import load_template
from prefgrpo.judge.verdict import JudgeError


def media(*levels):
    return [Media(np.full((32, 32, 3), level, np.uint8)) for level in levels]


def template(tmp_path, text, needs=("prompt", "media_1"), may=("source", "criterion"), kinds=None):
    path = tmp_path / "question.yaml"
    path.write_text(text)
    kinds = kinds or ("soft", "plain", "think", "flex", "edit", "scores", "json", "text")
    return load_template(str(path), needs, may, kinds)


@pytest.fixture
def server():
    with JudgeServer() as running:
        yield running


def client(server, **changes):
    return Client(HttpJudgeConfig(endpoints=(server.url,), timeout_s=5, retries=1, **changes))


def test_texts_by_name_and_pictures_in_their_places(tmp_path, server):
    asked = template(
        tmp_path,
        "user: 'By {criterion}: {source} then {media_1}, {media_2} for {prompt}, {criterion}'\nanswer: text",
        needs=("prompt", "media_1", "media_2"),
    )
    server.answer = lambda bright, text: " ".join(f"{255 * b:.0f}" for b in bright)
    values = {"prompt": "{criterion} {media_1}", "criterion": "{prompt}"}
    answer = client(server, image_format="png").ask(asked, values, media(10, 20), media(30, 40, 50)).result(10)
    assert answer.raw == "30 40 50 10 20" and answer.reason == "" and answer.value is None
    body = server.requests[0]
    assert text_of(body) == "By {prompt}:  then ,  for {criterion} {media_1}, {prompt}"
    kinds = [p["type"] for p in body["messages"][0]["content"]]
    assert kinds == ["text", *["image_url"] * 3, "text", "image_url", "text", "image_url", "text"]


def test_a_pair_with_its_source(tmp_path, server):
    path = tmp_path / "edit.yaml"
    path.write_text("user: 'Instruction: {prompt} {source} {media_1} {media_2}'\nanswer: edit\n")
    server.answer = lambda b, text: (
        f"<answer>Edited image {1 if abs(b[0] - b[1]) < abs(b[0] - b[2]) else 2} is better</answer>"
    )
    judge = HttpJudge(HttpJudgeConfig(endpoints=(server.url,), template=str(path)))
    dark, grey, bright = media(40, 120, 200)
    for source, winner in ((dark, 1.0), (bright, 0.0)):
        verdicts = judge.judge_group(
            "p", [grey, bright if source is dark else dark, source], [(0, 1), (0, 2)], [source]
        )
        assert [v.first for v in verdicts] == [1.0, 0.0], winner
    assert judge.submit("p", dark, bright, [dark]).result(30).first == 1.0
    none = judge.submit("p", dark, bright).result(30)
    assert none.first is None and "shows the source image" in none.reason


def test_yes_or_no_counts_every_spelling(tmp_path, server):
    asked = template(tmp_path, "user: '{prompt}{media_1}'\nlabels: ['Yes', 'No']\nvariants: true")
    exact = template(tmp_path, "user: '{prompt}{media_1}'\nlabels: ['Yes', 'No']")
    tokens = {"Yes": 0.3, " yes": 0.2, "YES": 0.1, "No": 0.1, " no": 0.05, "Maybe": 0.2, "Yesterday": 0.05}
    server.answer = lambda b, text: tokens
    j = client(server)
    assert j.ask(asked, {"prompt": ""}, media(5)).result(30).value == pytest.approx(0.6 / 0.75)
    assert j.ask(exact, {"prompt": ""}, media(5)).result(30).value == pytest.approx(0.3 / 0.4)
    server.answer = lambda b, text: {"Maybe": 0.9, "Yes": 0.004, "No": 0.001}
    found = j.ask(asked, {"prompt": ""}, media(5)).result(30)
    assert found.value is None and "probability" in found.reason


def test_scores_and_json_and_what_cannot_be_read(tmp_path, server):
    lines = template(
        tmp_path,
        "user: '{prompt}{media_1}'\nanswer: scores\nscores: {Alignment: [1, 5], Style: [1, 5]}\n"
        "pattern: '{name} Score (1-5): {value}'",
    )
    server.answer = lambda b, text: "**Alignment Score (1-5):** 4.5\nStyle Score (1-5): 9"
    j = client(server)
    answer = j.ask(lines, {"prompt": ""}, media(5)).result(30)
    assert answer.parts == {"Alignment": 4.5} and answer.value is None and not answer.reason
    pair = template(tmp_path, "user: '{prompt}{media_1}'\nanswer: json\nscores: {a: [0, 25], b: [0, 25]}")
    server.answer = lambda b, text: '```json\n{"reasoning": "a, ] b", "score": [20, 7.5,],}\n```'
    assert j.ask(pair, {"prompt": ""}, media(5)).result(30).parts == {"a": 20.0, "b": 7.5}
    for said in (
        '{"score": [20]}',
        '{"score": [20, 26]}',
        '{"score": [true, 1]}',
        "[1, 2]",
        '{"score": [1, NaN]}',
        "\ud800",
    ):
        server.answer = lambda b, text, said=said: said
        answer = j.ask(pair, {"prompt": ""}, media(5)).result(30)
        assert answer.parts == {} and answer.value is None and answer.reason, said
        answer.raw.encode()


def test_the_same_question_is_asked_once(tmp_path, server):
    asked = template(tmp_path, "user: '{prompt}{media_1}'\nanswer: text")
    server.answer = lambda bright, text: f"{text} {255 * bright[0]:.0f}"
    server.delay_s, j = 0.1, client(server)
    one, same, other = media(10, 10, 200)
    first = [j.ask(asked, {"prompt": "a"}, [one], once=True) for _ in range(3)]
    late = first[0].result(30) and j.ask(asked, {"prompt": "a"}, [one], once=True)
    rest = [j.ask(asked, {"prompt": "b"}, [one], once=True), j.ask(asked, {"prompt": "a"}, [other], once=True)]
    assert {f.result(30).raw for f in (*first, late)} == {"a 10"}
    assert [f.result(30).raw for f in rest] == ["b 10", "a 200"]
    assert len(server.requests) == 3
    assert j.ask(asked, {"prompt": "a"}, [same]).result(30).raw == "a 10" and len(server.requests) == 4
    del one, same, other, first, late, rest
    deadline = time.monotonic() + 30
    while len(j._asked) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not len(j._asked) and not len(j._encodings), "nothing is kept of a medium that is gone"


def test_a_question_shared_by_two_survives_the_one_that_leaves(tmp_path, server):
    asked = template(tmp_path, "user: '{prompt}{media_1}'\nanswer: text")
    server.answer, server.delay_s = (lambda bright, text: "here"), 0.4
    j, (one,) = client(server), media(10)
    leaves, stays = (j.ask(asked, {"prompt": "a"}, [one], once=True) for _ in range(2))
    while not server.requests:
        time.sleep(0.01)
    leaves.cancel()
    assert stays.result(30).raw == "here" and len(server.requests) == 1


def test_who_asks_right_after_all_left_gets_an_answer(tmp_path, server):
    asked = template(tmp_path, "user: '{prompt}{media_1}'\nanswer: text")
    server.answer, server.delay_s = (lambda bright, text: "here"), 0.2
    j, (one,) = client(server), media(10)

    async def leave_and_come_back():
        first = asyncio.ensure_future(j.answer(asked, {"prompt": "a"}, [one], once=True))
        while not server.requests:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0)
        return await j.answer(asked, {"prompt": "a"}, [one], once=True)

    j.prepare(asked)
    assert j.run(leave_and_come_back()).result(30).raw == "here"


def test_a_question_that_failed_is_asked_again(tmp_path, server):
    asked = template(tmp_path, "user: '{prompt}{media_1}'\nanswer: text")
    server.answer, server.fault, server.count = (lambda bright, text: "here"), "400", 1
    j, (one,) = client(server), media(10)
    assert "refused with 400" in j.ask(asked, {"prompt": "a"}, [one], once=True).result(30).reason
    assert j.ask(asked, {"prompt": "a"}, [one], once=True).result(30).raw == "here"


def test_judges_with_the_same_servers_share_a_client(server):
    config = {"endpoints": (server.url,), "timeout_s": 5.0}
    one, two = HttpJudge(HttpJudgeConfig(**config)), HttpJudge(HttpJudgeConfig(**config, template="think"))
    assert one.client is two.client is shared_client(HttpJudgeConfig(**config))
    assert HttpJudge(HttpJudgeConfig(**{**config, "timeout_s": 6.0})).client is not one.client
    two.close()
    dark, bright = media(40, 200)
    assert one.submit("p", dark, bright).result(30).first < 0.1


def test_clips_are_shown_by_the_sibling_template(server):
    judge = HttpJudge(HttpJudgeConfig(endpoints=(server.url,), template="compare"))
    clips = [Media(np.full((3, 32, 32, 3), level, np.uint8)) for level in (40, 200)]
    assert judge.submit("p", *clips).result(30).first < 0.1
    assert "Video 2" in text_of(server.requests[0]) and len(images(server.requests[0])) == 6
    assert judge.submit("p", *media(40, 200)).result(30).first < 0.1
    assert "Image 2" in text_of(server.requests[1])


def test_a_body_of_any_kind_is_sent_without_a_template(server):
    sender = Sender(SendConfig(endpoints=(server.url,), timeout_s=5, retries=1, backoff_s=0.01))
    body = b'{"model":"bright-judge","messages":[{"role":"user","content":[]}]}'
    with pytest.raises(SendError, match="404"):
        sender.thread.submit(
            sender.send("/nowhere", lambda endpoint, carried: body, lambda url, payload: payload)
        ).result(30)
    server.answer, server.fault, server.count = (lambda bright, text: "here"), "500", 1
    sent = sender.send("/v1/chat/completions", lambda endpoint, carried: body, lambda url, payload: payload)
    reply = sender.thread.submit(sent).result(30)
    assert b"here" in reply.value and reply.retries == 1 and reply.url == server.url


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("user: '{prompt}{media_1}{colour}'\nanswer: text", "nothing fills in {colour}"),
        ("user: '{prompt}{media_1}{source}{source}'\nanswer: text", "{source} once"),
        ("user: '{prompt}{media_1}'\nanswer: scores\nscores: {a: [1, 5]}", "pattern"),
        ("user: '{prompt}{media_1}'\nanswer: json", "needs scores"),
        ("user: '{prompt}{media_1}'\nanswer: json\nscores: {a: [5, 1]}", "low, high"),
        ("user: '{prompt}{media_1}'\nanswer: json\nscores: {a: [x, 1]}", "could not convert"),
        ("user: '{prompt}{media_1}'\nanswer: text\nmax_tokens: [1]", "int"),
        ("user: '{prompt}{media_1}'\nanswer: text\n3: 4", "unknown key"),
    ],
)
def test_a_bad_question_is_refused_by_name(tmp_path, text, complaint):
    with pytest.raises(JudgeError, match=complaint):
        template(tmp_path, text)


def test_a_pair_needs_an_answer_that_is_a_verdict(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("user: '{prompt}{media_1}{media_2}'\nanswer: text")
    with pytest.raises(JudgeError, match="soft, plain, think, flex, edit, got 'text'"):
        load_template(str(path))
    path.write_text("user: '{prompt}{media_1}{source}{media_2}'\nlabels: ['1', '2']")
    with pytest.raises(JudgeError, match="use backend http"):
        LocalJudge(LocalJudgeConfig("nowhere", template=str(path)))


def test_a_probability_above_one_is_none(tmp_path, server):
    asked = template(tmp_path, "user: '{prompt}{media_1}'\nlabels: ['Yes', 'No']")
    server.answer = lambda b, text: {"Yes": math.e, "No": 0.5}
    assert client(server).ask(asked, {"prompt": ""}, media(5)).result(30).value is None

"""Judges whose chat template cuts the space at the end of a prefill, in process and over HTTP.

Why these cases: Qwen3.5's, Qwen3.6's and Gemma 3's templates trim every message, so that the label would be read after
"Image" instead of "Image ": known answers stay right, the verdicts change, and nothing warns. Oracle: the same judge
with a template that keeps the space; with a real vLLM in tests/judge/test_vllm.py.
"""

import json
import shutil

import numpy as np
import pytest
from aiohttp import web
from ranks import until
from reward_cases import tiny_judge
from servers import JudgeServer, asker, images

from prefgrpo.data.media import Media
from prefgrpo.judge.check import check
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.local import LocalJudge
from tests.judge.test_http import PAIRS, judge, media, missing, right

TRIMS = (
    "{%- for message in messages %}{%- set content %}{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}{%- if part['type'] == 'text' %}{{- part['text'] }}{%- else %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- endif %}{%- endfor %}{%- endif %}{%- endset %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content|trim + '<|im_end|>\\n' }}{%- endfor %}"
)
"""A chat template that trims messages as Qwen3.5's does."""


def question(folder, **changes):
    """A template's file."""
    asked = {"user": "{prompt} {media_1} {media_2}", "prefill": "Image ", "labels": ["1", "2"]}
    (folder / "question.yaml").write_text(json.dumps(asked | changes))
    return str(folder / "question.yaml")


@pytest.mark.parametrize("kind", ["qwen3", "qwen25"])
def test_in_process_the_judge_reads_the_whole_prefill(tmp_path, kind):
    kept = tiny_judge(kind, tmp_path / "kept")
    cut = shutil.copytree(kept, tmp_path / "cut")
    (cut / "chat_template.jinja").write_text(TRIMS)
    noise = [Media(n) for n in np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), np.uint8)]
    seen = set()
    for prefill in ("Image", "Image ", " Image  ", "Image\n"):
        file = question(tmp_path, prefill=prefill)
        verdicts = []
        for folder in (kept, cut):
            opened = asker(LocalJudge(str(folder)), file)
            opened.judge.min_label_mass = 0.0
            verdicts.append([v.value for v in opened.judge_group("a cat", noise, [(0, 1), (1, 2)])])
        assert verdicts[0] == verdicts[1] and None not in verdicts[0]
        seen.add(verdicts[0][0])
    assert len(seen) == 4, "the white space matters, so equality is not trivial"


@pytest.mark.parametrize("own", [{}, {"max_completion_tokens": 1}, {"max_tokens": 1, "allowed_token_ids": [49, 50]}])
def test_over_http_the_space_is_written_and_the_label_read_after_it(tmp_path, own):
    with JudgeServer() as server:
        server.trims = True
        asked = judge(server.url, template=question(tmp_path, request=own))
        assert all(right(asked)) and len(server.requests) == len(PAIRS)
        sent = server.requests[0]
        assert (
            sent["allowed_token_ids"] == [ord(" ")] and sent.get("max_completion_tokens", sent.get("max_tokens")) == 2
        )
        assert ("max_tokens" in sent) != ("max_completion_tokens" in sent)
        assert all(right(judge(server.url, timeout_s=5.0)))


def test_a_server_that_keeps_the_space_or_a_prefill_without_one_is_asked_for_one_token(tmp_path):
    for trims, prefill in ((False, "Image "), (True, "Image:")):
        with JudgeServer() as server:
            server.trims = trims
            assert all(right(judge(server.url, template=question(tmp_path, prefill=prefill))))
            assert all("allowed_token_ids" not in sent and sent["max_tokens"] == 1 for sent in server.requests)


class Words(JudgeServer):
    """A tokenizer with a token for each word and the spaces before it."""

    trims = True

    async def _tokenize(self, request):
        words = self.prompt(await request.json()).replace(" ", " _").split(" ")
        return web.json_response({"tokens": [sum(map(ord, word)) for word in words]})


def test_labels_that_are_one_token_with_their_space_are_read_at_once():
    with Words() as server:
        judge(server.url).judge_group("p", media([40, 200]), [(0, 1)])
        assert "allowed_token_ids" not in server.requests[0] and server.requests[0]["max_tokens"] == 1


@pytest.mark.parametrize(
    ("vllm", "changes", "reason"),
    [
        (True, {"prefill": "Image  "}, r"labels \('1', '2'\) are not one token after it"),
        (True, {"labels": ["first", "second"]}, "are not one token after it"),
        (False, {}, "it has no /tokenize"),
    ],
)
def test_where_the_space_cannot_be_written_the_judge_is_refused_by_name(tmp_path, vllm, changes, reason):
    file = question(tmp_path, **changes)
    with JudgeServer(vllm=vllm) as server:
        server.trims = True
        missing(
            judge(server.url, template=file).judge_group("p", media([40, 200]), [(0, 1)]), "or use a template without"
        )
        with pytest.raises(JudgeError, match=f"(?s)cuts the space at the end of the prefill 'Image +', and .*{reason}"):
            check(*judge(server.url, template=file, timeout_s=5.0))
        server.trims = False
        kept = judge(server.url, template=file, timeout_s=4.0)
        assert all(right(kept)) or "neither label" in kept.judge_group("p", media([40, 200]), [(0, 1)])[0].reason


@pytest.mark.parametrize(
    "reply", [{}, {"tokens": []}, {"usage": None}, {"usage": {}}, {"usage": {"prompt_tokens": 0}}, [], 500, 501]
)
def test_a_server_that_tells_neither_tokens_nor_usage_is_asked_as_before(reply):
    class Odd(JudgeServer):
        async def _tokenize(self, request):
            return web.Response(status=reply) if isinstance(reply, int) else web.json_response(reply)

        def _answer(self, body):
            return super()._answer(body) if images(body) else web.json_response(reply)

    with Odd() as server:
        assert all(right(judge(server.url)))


class Fails(JudgeServer):
    """/tokenize answers with `status` from its `first`-th call on, to the `last`-th."""

    trims = True
    first = 1
    last = 9**9
    status = 401
    calls = 0

    async def _tokenize(self, request):
        self.calls += 1
        if self.first <= self.calls <= self.last:
            return web.Response(status=self.status)
        return await super()._tokenize(request)


@pytest.mark.parametrize("status", [401, 429, 500, 502, 503, 504])
def test_a_gateway_that_has_no_such_path_is_asked_as_before(status):
    with Fails() as server:
        server.trims = False
        server.status = status
        assert all(right(judge(server.url, deadline_s=20.0)))


@pytest.mark.parametrize("first", [2, 3])
def test_an_answer_that_fails_in_between_says_nothing_of_the_space(first):
    with Fails() as server:
        server.first = server.last = first
        server.status = 500
        asked = judge(server.url, deadline_s=20.0)
        assert all(right(asked)) and all(sent["max_tokens"] == 2 for sent in server.requests)


def test_a_prefill_that_ends_with_another_white_space_is_read_after_it(tmp_path):
    with JudgeServer() as server:
        server.trims = True
        assert all(right(judge(server.url, template=question(tmp_path, prefill="Answer:\n"))))
        assert server.requests[0]["allowed_token_ids"] == [ord("\n")]


def test_the_templates_own_chat_template_is_the_one_that_is_looked_at(tmp_path):
    class Own(JudgeServer):
        """Trims, unless the request brings its own chat template."""

        def prompt(self, body):
            self.trims = "chat_template" not in body
            return super().prompt(body)

    with Own() as server:
        file = question(tmp_path, request={"chat_template": "{{ messages }}"})
        assert all(right(judge(server.url, template=file)))
        assert all("allowed_token_ids" not in sent for sent in server.requests)


def test_what_a_server_cuts_is_asked_again_after_a_restart(tmp_path):
    with JudgeServer() as server:
        asked = judge(server.url, timeout_s=5.0, deadline_s=20.0)
        assert all(right(asked))
    answer = asked.submit("p", *media([40, 200]))
    until(lambda: asked.judge.pool.endpoints[0].problem)
    restarted = JudgeServer(port=server.port)
    restarted.trims = True
    with restarted:
        assert answer.result(20).value < 0.1
        assert all(right(asked))
        assert restarted.requests[-1]["allowed_token_ids"] == [ord(" ")]

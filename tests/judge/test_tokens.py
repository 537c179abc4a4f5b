"""What tokenizers and chat templates make of a question's texts, in process and over HTTP.

Why these cases: Qwen-VL reads <|image_pad|> in a prompt as the place of an image, so that every image moves by one
place and the server answers 200 with another verdict. The tokens come from transformers: real tokenizers, as vLLM tells
of them, and the source of the processors of known families. And the chat templates of Qwen3.5, Qwen3.6 and Gemma 3 trim
every message, so that the label would be read after "Image" instead of "Image ": known answers stay right, the verdicts
change, and nothing warns. Oracle: the same judge with a template that keeps the space; with a real vLLM in
tests/judge/test_vllm.py.
"""

import ast
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers
from aiohttp import web
from ranks import until
from reward_cases import JUDGE_TOKENIZER, tiny_judge
from servers import JudgeServer, asker, images, speak
from servers import judge as options
from tokenizers import AddedToken
from world import grey

from prefgrpo.data.media import Media
from prefgrpo.judge.check import Shape, check
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.local import LocalJudge
from prefgrpo.judge.template import load_template
from prefgrpo.judge.tokens import KNOWN, served_tokens
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Sample
from tests.judge.test_http import PAIRS, PATIENT, ask, judge, media, missing, right

# ---- special tokens --------------------------------------------------------------------------------------------------

QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
        "<|image_pad|>", "<|video_pad|>"]  # fmt: skip
HARMLESS = [
    "a <b>bold</b> <3 | x <| y |> z [IMG 1] [red] <tag>",
    "2 < 3, 4 > 1",
    "True and None",
    "<!DOCTYPE html>\n\n\t",
    "|image_pad|",
    "<image_1> beside <image 2>, [MASKED], [PANEL 1], <boxes>, <frames>",
]
PUBLISHED = {  # special tokens of published tokenizer_config.json that no processor's source names
    "InternVL": "<img> </img> <IMG_CONTEXT> <quad> </quad> <ref> </ref> <box> </box> <|im_end|> <|action_start|>",
    "Gemma 3": "<bos> <eos> <pad> <unk> <mask> <start_of_turn> <end_of_turn> <start_of_image> <image_soft_token>",
    "LLaVA": "<image> <s> </s> <unk> <pad> <im_patch> <im_start> <im_end>",
    "GLM-V": "[MASK] [gMASK] [sMASK] <sop> <eop> <|user|> <|begin_of_image|> <|begin_of_box|> <|endoftext|>",
    "Pixtral": "<s> </s> [INST] [/INST] [IMG] [IMG_BREAK] [IMG_END] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_RESULTS]",
    "Kimi-VL": "[BOS] [EOS] [EOT] [PAD] [UNK] <|im_user|> <|im_middle|> <|media_pad|>",
    "MiniCPM-V": "<image> </image> <image_id> </image_id> <slice> </slice> <box> </box> <unk>",
    "SmolVLM": "<row_1_col_12> <global-img> <fake_token_around_image> <end_of_utterance>",
}
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma4", "llava_onevision", "pixtral", "glm46v", "kimi_k25", "smolvlm", "llama4",
            "step3p7", "ovis2")  # fmt: skip


def tokenizer_info(tokenizer):
    """What vLLM's /tokenizer_info says of a tokenizer: its arguments, and of a token only the text."""

    def plain(value):
        if hasattr(value, "content"):
            return value.content
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list) else value

    return plain({k: v for k, v in tokenizer.init_kwargs.items() if k != "vocab_file"})


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(JUDGE_TOKENIZER)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    made = LocalJudge(tiny_judge("qwen3", tmp_path_factory.mktemp("judge")))
    made.min_label_mass = 0.0
    return asker(made)


@pytest.mark.parametrize("tells", [False, True])
def test_a_special_token_is_missing_in_process_and_over_http(local, tokenizer, tells):
    noise = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), np.uint8)
    with JudgeServer() as server:
        server.tokenizer = tokenizer_info(tokenizer) if tells else None
        served = judge(server.url, **PATIENT)
        for token in QWEN:
            for prompt in (token, f"a sign{token}of wood"):
                (over_http,) = served.judge_group(prompt, media([40, 200]), [(0, 1)])
                (in_process,) = local.judge_group(prompt, list(map(Media, noise)), [(0, 1)])
                assert over_http.value is in_process.value is None
                assert over_http.reason == in_process.reason and f"special token {token}" in over_http.reason
        assert not server.requests
        for prompt in HARMLESS:
            assert served.judge_group(prompt, media([40, 200]), [(0, 1)])[0].value < 0.5
            assert local.judge_group(prompt, list(map(Media, noise)), [(0, 1)])[0].value is not None


def test_a_server_that_tells_its_tokens_is_taken_at_its_word(tokenizer):
    """<image> is a token of LLaVA and plain text for Qwen; an unknown server may be either."""
    with JudgeServer() as server:
        served = judge(server.url, **PATIENT)
        assert ask(served)[0].value is not None
        refused = served.judge_group("an <image> tag", media([40, 200]), [(0, 1)])
        server.tokenizer = tokenizer_info(tokenizer)
        told_own = judge(server.url, timeout_s=10.0)
        assert refused[0].value is None and "special token <image>" in refused[0].reason
        assert told_own.judge_group("an <image> tag", media([40, 200]), [(0, 1)])[0].value < 0.5
        assert told_own.judge_group("a <|im_end|> tag", media([40, 200]), [(0, 1)])[0].value is None


def test_the_tokens_of_every_form_of_a_tokenizers_configuration(tokenizer):
    """transformers 5 and 4, on disk and as vLLM tells it; Gemma's added tokens are mostly white space and HTML."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {str(k): flags | {"content": t, "special": t != "<think>"} for k, t in enumerate([*QWEN, "<think>"])}
    gemma = ["<start_of_turn>", "<pad>", "\n\n", "▁▁", "<b>", "</table>", "<unused7>"]
    forms = {
        "transformers 5": tokenizer_info(tokenizer),
        "transformers 4, as served": {
            "added_tokens_decoder": {str(k): t for k, t in enumerate(QWEN)},
            "bos_token": None,
        },
        "transformers 4, on disk": {"added_tokens_decoder": added, "eos_token": added["2"]},
        "lists": {"additional_special_tokens": ["", None, *QWEN], "add_bos_token": True, "eos_token": ""},
        "names": {"extra_special_tokens": {f"a{k}": token for k, token in enumerate(QWEN)}},
        "names of transformers 5": {"model_specific_special_tokens": dict(zip("abcdefgh", QWEN, strict=True))},
    }
    for name, config in forms.items():
        found = served_tokens(json.dumps(config).encode())
        assert found and all(found.search(f"a{t}b")[0] == t for t in QWEN), name
        assert not any(found.search(text) for text in (*HARMLESS, "<think>")), name
    found = served_tokens(json.dumps({"added_tokens_decoder": dict(enumerate(gemma))}).encode())
    assert [t for t in gemma if found.search(t)] == ["<start_of_turn>", "<pad>"]
    assert AddedToken("<b>").special is False
    for nothing in (b"", b"<html>", b"[]", b"{}", b'{"added_tokens_decoder": [1]}', b'{"a_token": ""}'):
        assert served_tokens(nothing) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_known_families_are_known(family):
    """All strings in the source of their processors that are written as a token."""
    folder = Path(transformers.__file__).parent / "models" / family
    trees = [ast.parse(file.read_text()) for file in folder.glob("processing_*.py")]
    texts = [n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    tokens = {text for text in texts if isinstance(text, str) and re.fullmatch(r"<[^\s<>{}]+>|\[[A-Z_/]+\]", text)}
    assert tokens and all(KNOWN.fullmatch(token) for token in tokens)


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_published_tokens_of_known_families_are_known(family):
    assert [token for token in PUBLISHED[family].split() if not KNOWN.fullmatch(token)] == []


# reward -> what its question takes from a sample
ASKING = {
    "unifiedreward_alignment": {"prompt": "a cat{}"},
    "unigenbench": {"sub_dims_en": json.dumps({"Testpoints": ["Style"], "Testpoint Description": ["ink{}"]})},
    "soft_tifa": {"vqa_list": [["How many {}cats?", "two"]]},
    "consistency_score": {"prompt": "a 2x2 grid of cats", "criteria": {"a": {"b": "strict{}"}}},
    "vlm_pairwise": {"prompt": "a cat{}"},
}


@pytest.mark.parametrize("name", ASKING)
def test_no_reward_asks_a_question_with_a_special_token(name):
    def sample(token):
        columns = json.loads(json.dumps(ASKING[name]).replace("{}", token))
        return Sample(columns.pop("prompt", "a cat"), grey(90), (), columns)

    template = {"consistency_score": {"template": "consistency_criterion"}}.get(name, {})
    with JudgeServer() as server:
        server.answer = None if name == "vlm_pairwise" else speak
        reward = build([name], {name: {"judge": options(server)} | template})[name]
        before = len(server.requests)  # of the check
        scores = reward.score([sample("<|image_pad|>"), sample("<|image_pad|>")])
        assert [s.value for s in scores] == [None, None] and len(server.requests) == before
        assert all("special token <|image_pad|>" in s.reason for s in scores)
        assert all(s.value is not None for s in reward.score([sample(""), sample("")]))


def test_a_template_with_a_special_token_is_refused_at_the_start(tmp_path):
    file = tmp_path / "t.yaml"
    file.write_text("user: '{prompt} <image> {media_1} {media_2}'\nlabels: ['1', '2']\n")
    assert load_template(str(file))
    with JudgeServer() as server, pytest.raises(Exception, match=r"template.* special token <image>"):
        check(*judge(server.url, template=str(file)))


def test_one_such_prompt_does_not_end_the_run():
    """The check asks about the longest prompt of the run."""
    with JudgeServer() as server:
        found = check(*judge(server.url, **PATIENT), shape=Shape(prompt="x" * 1000 + "<|image_pad|>"))
        assert not found.problem and len(server.requests) == 1


# ---- the space after a prefill ---------------------------------------------------------------------------------------

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


class Words(JudgeServer):
    """A tokenizer with a token for each word and the spaces before it."""

    async def _tokenize(self, request):
        words = self.prompt(await request.json()).replace(" ", " _").split(" ")
        return web.json_response({"tokens": [sum(map(ord, word)) for word in words]})


class Own(JudgeServer):
    """Trims, unless the request brings its own chat template."""

    def prompt(self, body):
        self.trims = "chat_template" not in body
        return super().prompt(body)


# server, whether it trims, the template's keys, the token that it must write before the label
SPACES = {
    "cut": (JudgeServer, True, {}, " "),
    "cut, another name of max_tokens": (JudgeServer, True, {"request": {"max_completion_tokens": 1}}, " "),
    "cut, other tokens allowed": (JudgeServer, True, {"request": {"max_tokens": 1, "allowed_token_ids": [49]}}, " "),
    "cut, a line break": (JudgeServer, True, {"prefill": "Answer:\n"}, "\n"),
    "kept": (JudgeServer, False, {}, ""),
    "no space": (JudgeServer, True, {"prefill": "Image:"}, ""),
    "kept by the template's own chat template": (Own, True, {"request": {"chat_template": "{{ messages }}"}}, ""),
}


@pytest.mark.parametrize("name", SPACES)
def test_over_http_the_space_is_written_where_it_is_cut_and_the_label_read_after_it(tmp_path, name):
    kind, trims, changes, space = SPACES[name]
    with kind() as server:
        server.trims = trims
        assert all(right(judge(server.url, template=question(tmp_path, **changes), **PATIENT)))
    assert len(server.requests) == len(PAIRS)
    for sent in server.requests:
        assert ("max_tokens" in sent) != ("max_completion_tokens" in sent)
        assert sent.get("max_completion_tokens", sent.get("max_tokens")) == 1 + bool(space)
        assert sent.get("allowed_token_ids") == ([ord(space)] if space else None)


def test_labels_that_are_one_token_with_their_space_are_read_at_once():
    with Words() as server:
        server.trims = True
        judge(server.url, **PATIENT).judge_group("p", media([40, 200]), [(0, 1)])
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
        missing(ask(judge(server.url, template=file)), "or use a template without")
        with pytest.raises(JudgeError, match=f"(?s)cuts the space at the end of the prefill 'Image +', and .*{reason}"):
            check(*judge(server.url, template=file, timeout_s=15.0))
        server.trims = False
        kept = judge(server.url, template=file, timeout_s=14.0)
        assert all(right(kept)) or "neither label" in ask(kept)[0].reason


class Odd(JudgeServer):
    """/tokenize answers with `reply`, a status or a body, from its `first`-th call on, to the `last`-th; a body also
    answers a question without images, which would tell the number of tokens."""

    reply: object = 401
    first = 1
    last = 9**9
    calls = 0

    async def _tokenize(self, request):
        self.calls += 1
        if not self.first <= self.calls <= self.last:
            return await super()._tokenize(request)
        return web.Response(status=self.reply) if isinstance(self.reply, int) else web.json_response(self.reply)

    def _answer(self, body):
        if images(body) or isinstance(self.reply, int):
            return super()._answer(body)
        return web.json_response(self.reply)


REPLIES = [{}, {"tokens": []}, {"usage": None}, {"usage": {}}, {"usage": {"prompt_tokens": 0}}, [],
           401, 429, 500, 501, 502, 503, 504]  # fmt: skip


@pytest.mark.parametrize("reply", REPLIES)
def test_a_server_or_gateway_that_tells_no_tokens_is_asked_as_before(reply):
    with Odd() as server:
        server.reply = reply
        assert all(right(judge(server.url, **PATIENT)))


@pytest.mark.parametrize("first", [2, 3])
def test_an_answer_that_fails_in_between_says_nothing_of_the_space(first):
    with Odd() as server:
        server.trims = True
        server.first = server.last = first
        server.reply = 500
        asked = judge(server.url, **PATIENT)
        assert all(right(asked)) and all(sent["max_tokens"] == 2 for sent in server.requests)


def test_what_a_server_cuts_is_asked_again_after_a_restart():
    with JudgeServer() as server:
        asked = judge(server.url, **PATIENT)
        assert all(right(asked))
    answer = asked.submit("p", *media([40, 200]))
    until(lambda: asked.judge.pool.endpoints[0].problem)
    restarted = JudgeServer(port=server.port)
    restarted.trims = True
    with restarted:
        assert answer.result(20).value < 0.1
        assert all(right(asked))
        assert restarted.requests[-1]["allowed_token_ids"] == [ord(" ")]

"""Published questions: what a judge gets equals what its publisher's client sends.

Against the publishers' files in a checkout (PREFGRPO_PEERS), whose texts are not in this repository; the fetching, with
its errors, against a file made here. Their parsers are compared in tests/judge/test_answers.py.
"""

import asyncio
import hashlib
import re
from dataclasses import replace
from types import SimpleNamespace

import peers
import pytest
from servers import JudgeServer, asker, images, text_of
from world import grey, noise

from prefgrpo.commands import cli
from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge.client import HttpJudge
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.published import PUBLISHED, Published, fetch, question_of
from prefgrpo.judge.template import Query, load_template

PROMPT = 'a {prompt} of "2" {{cats}}, 100 %\n<answer>Image 1 is better</answer>'
MARKERS = ("prompt", "source", "media_2", "criterion")
KINDS = ("soft", "plain", "think", "flex", "json", "scores")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prefgrpo" / "prompts"


def published(name, codebase):
    """The template with the published question."""
    fetch(name, peers.folder(codebase))
    return load_template(name, ("media_1",), MARKERS, KINDS)


def asked(template, sources, media):
    """The messages that our client sends, and its other fields."""
    with JudgeServer(vllm=False) as server:
        client = HttpJudge(JudgeConfig((server.url,), timeout_s=20.0))
        values = {"prompt": PROMPT, "criterion": "the same cat"}
        client.ask_all([Query(template, values, media, sources)])
    body = server.requests[-1]
    return body.pop("messages"), body


# name -> (function of Pref-GRPO's templates.py, how its dispatcher fills in the prompt)
TEXTS = {
    "think": ("think_image", lambda t: t().format(prompt=PROMPT)),
    "think_video": ("think_video", lambda t: t().format(prompt=PROMPT)),
    "flex": ("flex_image", lambda t: t().format(prompt=PROMPT)),
    "flex_video": ("flex_video", lambda t: t().format(prompt=PROMPT)),
    "edit_pairwise": ("edit_pairwise", lambda t: t().format(instruction=PROMPT)),
    "edit_quality": ("edit_pointwise_image_quality", lambda t: t()),
    "edit_following": ("edit_pointwise_instruction_following", lambda t: t(PROMPT)),
    "unifiedreward": ("image", lambda t: t().format(prompt=PROMPT)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_question_equals_that_of_pref_grpos_client(name, cache, monkeypatch):
    symbol, fill = TEXTS[name]
    theirs = peers.file_module("pref_grpo", "fastvideo/rewards/templates.py", "their_templates", monkeypatch)
    request = peers.file_module("pref_grpo", "vllm_utils/vllm_request.py", "their_request", monkeypatch)
    template = published(name, "pref_grpo")
    source = [noise(3, 300, 300)] if template.takes_source else []
    media = [noise(k, 300, 300) for k in range(2 if "media_2" in "".join(template.pieces) else 1)]
    client = request.VLMessageClient("")
    files = []
    for number, medium in enumerate([*source, *media]):
        file = cache.parent / f"{number}.png"
        medium.pil.save(file)
        files.append(str(file))
    problem = fill(getattr(theirs, f"get_unifiedreward_{symbol}_template"))
    messages, fields = asked(template, source, media)
    assert messages == client.build_messages({"images": files, "problem": problem})
    assert fields["max_tokens"] == 4096


def paco(file, names, sent):
    """(methods of PaCo's scorer, a scorer whose client appends the requests to `sent`)."""

    async def create(**fields):
        sent.append(fields)

    functions = peers.methods(
        "paco", f"paco_grpo/rewards/{file}", *names,
        asyncio=asyncio, combinations=lambda items, n: [tuple(items)], hash_pil_image=id,
        divide_prompt=lambda text: [text], extract_grid_info=lambda text: None, divide_image=lambda image, grid: image,
        pil_image_to_base64=str, get_yes_cond_prob_from_completion=lambda *a, **k: 0.5,
    )  # fmt: skip
    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    fields = {"max_retries": 1, "global_semaphore": asyncio.Semaphore(), "model": "", "timeout": 1, "client": client}
    return functions, SimpleNamespace(cache={}, add_to_cache=lambda *a: None, **fields)


def same_question(theirs, messages, fields):
    """The same parts and fields, images apart."""
    kinds = [[p["type"] for p in m[0]["content"]] for m in (theirs["messages"], messages)]
    assert kinds[0] == kinds[1] == ["image_url", "image_url", "text"]
    assert theirs["messages"][0]["content"][2] == messages[0]["content"][2]
    assert theirs["max_completion_tokens"] == fields["max_tokens"] == 1
    for key in ("temperature", "logprobs", "top_logprobs"):
        assert theirs[key] == fields[key]


@pytest.mark.parametrize(
    ("name", "version"), [("consistency_criterion", 0), ("consistency", 1), ("consistency_no_duplicates", 2)]
)
def test_a_question_equals_that_of_pacos_scorer_of_sets(name, version, cache):
    template = published(name, "paco")
    sent = []
    (compute, *_), scorer = paco("consistency_scorer.py", ["_async_compute_image_consistency"], sent)
    scorer.prompt_template_version = version
    asyncio.run(compute(scorer, PROMPT, ("one", "two"), "the same cat"))
    same_question(sent[0], *asked(template, [], [noise(0), noise(1)]))


@pytest.mark.parametrize(("name", "number"), [("edit_consistency", 0), ("edit_done", 1)])
def test_a_question_equals_that_of_pacos_scorer_of_edits(name, number, cache):
    template = published(name, "paco")
    sent = []
    names = ["__async_call__", "_async_compute_image_consistency"]
    (call, compute, *_), scorer = paco("consistency_for_editing.py", names, sent)
    scorer._async_compute_image_consistency = lambda **more: compute(scorer, **more)
    asyncio.run(call(scorer, ["edited"], [PROMPT], [{"ref_image": "source"}]))
    assert sent[number]["messages"][0]["content"][0]["image_url"]["url"] == "source"
    same_question(sent[number], *asked(template, [noise(0)], [noise(1)]))


# ---- fetching --------------------------------------------------------------------------------------------------------

CODE = """
raise RuntimeError("executed")
def question(prompt):
    text = f"no: {prompt}"
    return "Compare {{a}} and " + "{prompt}." if False else "?"
def ask():
    return "Judge {{1}}: {prompt}, " "{prompt}!"
class A:
    def b(self, main_prompt):
        text = "first"
        text = (f"On {main_prompt}: " "is it {x}?")
"""


def row(**changes):
    source = ("owner/name", "0" * 40, "a/b.py", hashlib.sha256(CODE.encode()).hexdigest(), "theirs")
    return replace(Published(source, "ask", ("media_1", "media_2"), formatted=True), **changes)


def test_texts_are_read_from_the_syntax_tree():
    assert question_of(CODE, row()) == "Judge {1}: {prompt}, {prompt}!"
    said = question_of(CODE, row(symbol="text", number=2, formatted=False))
    assert said == "On {prompt}: is it {x}?"


def test_a_run_asks_in_published_words_once_they_are_fetched(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PUBLISHED, "think", row())
    monkeypatch.setitem(PUBLISHED, "think_video", row())
    (tmp_path / "clone" / "a").mkdir(parents=True)
    file = tmp_path / "clone" / "a" / "b.py"
    file.write_text(CODE)
    with JudgeServer() as server:
        config = JudgeConfig((server.url,))
        with pytest.raises(JudgeError, match=r"run `prefgrpo judge prompts think`"):
            asker(config, "think")
        words = ["judge", "prompts", "think", "--from", str(tmp_path / "clone")]
        assert cli.main(words) == 0 and "licence: theirs" in capsys.readouterr().out
        assert cli.main(["judge", "prompts"]) == 0
        assert re.search(r"think +fetched +owner/name a/b.py", capsys.readouterr().out)
        judge = asker(config, "think")
        judge.judge_group("a cat", [grey(40), grey(200)], [(0, 1)])
        body = server.requests[-1]
        assert text_of(body) == "Judge {1}: a cat, a cat!" and len(images(body)) == 2
        assert [p["type"] for p in body["messages"][0]["content"]] == ["image_url", "image_url", "text"]
        server.answer = lambda bright, text: "<think>.</think><answer>Image 1 is better</answer>"
        words = ["judge", "check", "--endpoint", server.url, "--template", "think"]
        assert cli.main(words) == 1, "it always names the first"
        assert text_of(server.requests[-1]).startswith("Judge {1}: a plain ")
    file.write_text(CODE + "\n")
    with pytest.raises(JudgeError, match=r"expected a/b.py of owner/name at commit 0+ \(SHA-256"):
        fetch("think", file)
    with pytest.raises(JudgeError, match="did you mean 'think'"):
        fetch("thnk")

"""Prompts that hold a special token of the judge: no question about them is asked, in process or over HTTP.

Why these cases: Qwen-VL reads <|image_pad|> in a prompt as the place of an image, so that every image moves by one
place and the server answers 200 with another verdict. The tokens come from transformers: real tokenizers, as vLLM tells
of them, and the source of the processors of known families.
"""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
import transformers
from reward_cases import JUDGE_TOKENIZER, tiny_judge
from servers import JudgeServer, asker, judge, speak
from tokenizers import AddedToken
from world import grey

from prefgrpo.data.media import Media
from prefgrpo.judge.check import Shape, check
from prefgrpo.judge.local import LocalJudge
from prefgrpo.judge.special_tokens import KNOWN, served_tokens
from prefgrpo.judge.template import load_template
from prefgrpo.rewards import build as build_rewards
from prefgrpo.rewards.base import Sample
from tests.judge.test_http import ask, media
from tests.judge.test_http import judge as pair_judge

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
FAMILIES = (
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma4",
    "llava_onevision",
    "pixtral",
    "glm46v",
    "kimi_k25",
    "smolvlm",
    "llama4",
    "step3p7",
    "ovis2",
)


def told(tokenizer):
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
        server.tokenizer = told(tokenizer) if tells else None
        served = pair_judge(server.url)
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
        served = pair_judge(server.url)
        assert ask(served)[0].value is not None
        refused = served.judge_group("an <image> tag", media([40, 200]), [(0, 1)])
        server.tokenizer = told(tokenizer)
        told_own = pair_judge(server.url, timeout_s=5.0)
        assert refused[0].value is None and "special token <image>" in refused[0].reason
        assert told_own.judge_group("an <image> tag", media([40, 200]), [(0, 1)])[0].value < 0.5
        assert told_own.judge_group("a <|im_end|> tag", media([40, 200]), [(0, 1)])[0].value is None


def test_the_tokens_of_every_form_of_a_tokenizers_configuration(tokenizer):
    """transformers 5 and 4, on disk and as vLLM tells it; Gemma's added tokens are mostly white space and HTML."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {str(k): flags | {"content": t, "special": t != "<think>"} for k, t in enumerate([*QWEN, "<think>"])}
    gemma = ["<start_of_turn>", "<pad>", "\n\n", "▁▁", "<b>", "</table>", "<unused7>"]
    forms = {
        "transformers 5": told(tokenizer),
        "transformers 4, told": {"added_tokens_decoder": {str(k): t for k, t in enumerate(QWEN)}, "bos_token": None},
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
        reward = build_rewards([name], {name: {"judge": judge(server)} | template})[name]
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
        check(*pair_judge(server.url, template=str(file)))


def test_one_such_prompt_does_not_end_the_run():
    """The check asks about the longest prompt of the run."""
    with JudgeServer() as server:
        found = check(*pair_judge(server.url), shape=Shape(prompt="x" * 1000 + "<|image_pad|>"))
        assert not found.problem and len(server.requests) == 1

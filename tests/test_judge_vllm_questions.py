"""Every kind of question to a real vLLM: spellings of Yes and No, a pair with its source, 16 frames, scores in words.

Needs a vLLM environment, as tests/test_judge_vllm.py. Why these cases: they are what an OpenAI server and vLLM may
read differently (image order, images sent by id, label ids). Oracle: transformers' forward on the whole question,
which has none of our client in it. Served in fp32, so that equality is tight.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from judge_server import free_port

import prefgrpo
from prefgrpo.data.media import Media
from prefgrpo.judge.engines import ServeConfig
from prefgrpo.judge.http import Client, HttpJudgeConfig
from prefgrpo.judge.serve import Server
from prefgrpo.judge.template import load_template, spellings
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Sample

MODEL = str(Path(prefgrpo.__file__).parent / "tiny" / "assets" / "judge")
VLLM = os.environ.get("PREFGRPO_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM, reason="PREFGRPO_VLLM names no vLLM environment (scripts/setup_vllm_cpu.sh)"),
    pytest.mark.skipif(not Path(MODEL).is_dir(), reason="the demo world's judge is not in this checkout"),
]
PAD = "<|image_pad|>"
YES_NO = "user: '{prompt} {source} then {media_1}?'\nlabels: ['y', 'n']\nvariants: true\n"
EDIT = "user: 'Instruction: {prompt} {source} 1: {media_1} 2: {media_2}'\nprefill: 'Image '\nlabels: ['1', '2']\n"
CLIPS = "user: '{prompt} 1: {media_1} 2: {media_2}'\nprefill: 'Video '\nlabels: ['1', '2']\n"


@pytest.fixture(scope="module")
def url():
    port = free_port()
    config = ServeConfig(MODEL, VLLM, port=port, name="tiny", template="caption_match", cpu=True, dtype="float32",
                         vision_tokens=4, max_model_len=2048, startup_s=240)  # fmt: skip
    with Server(config) as server:
        server.wait_ready()
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def stock():
    """(template, prompt, images in order) -> log-probabilities of the next token, by transformers alone."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    processor = transformers.AutoImageProcessor.from_pretrained(MODEL)
    model = transformers.AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32).eval()
    merge = model.config.vision_config.spatial_merge_size**2

    def forward(template, prompt, shown):
        """`shown`: images of each place in the user's turn."""
        places = iter(shown)
        content = []
        for part in template.parts(prompt):
            text = [{"type": "text", "text": part}] if isinstance(part, str) else []
            content += text or [{"type": "image"} for _ in next(places)]
        turns = [{"role": "user", "content": content}]
        how = {"add_generation_prompt": True}
        if template.prefill:
            turns.append({"role": "assistant", "content": [{"type": "text", "text": template.prefill}]})
            how = {"continue_final_message": True}
        text = tokenizer.apply_chat_template(turns, tokenize=False, **how)
        flat = [m.pil for place in shown for m in place]
        inputs = processor(images=flat, return_tensors="pt")
        pads = [PAD * int(g.prod() // merge) for g in inputs["image_grid_thw"]] + [""]
        text = "".join(a + b for a, b in zip(text.split(PAD), pads, strict=True))
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        kinds = (ids["input_ids"] == model.config.image_token_id).int()
        with torch.no_grad():
            return model(**ids, **inputs, mm_token_type_ids=kinds).logits[0, -1].double().log_softmax(-1), tokenizer

    return forward


def pictures(count, seed=0):
    noise = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return [Media(n.repeat(16, 0).repeat(16, 1)) for n in noise]


def question(tmp_path, text, needs):
    (tmp_path / "question.yaml").write_text(text)
    return load_template(str(tmp_path / "question.yaml"), needs)


def ask(url, asked, values, media, source=(), **changes):
    config = HttpJudgeConfig(endpoints=(url,), image_format="webp", min_label_mass=0.0, **changes)
    client = Client(config)
    answers = [client.ask(asked, values, media, source).result(60) for _ in range(2)]  # data, then ids alone
    assert all(not a.reason for a in answers), answers
    assert answers[0].value == pytest.approx(answers[1].value, abs=1e-6)
    endpoint = client.sender.endpoints[0]
    assert endpoint.vllm and (endpoint._misses, endpoint.uses_ids) == (0, True)
    return answers[0].value


def two(p):
    return p[0] / (p[0] + p[1])


def test_every_spelling_of_yes_and_no(tmp_path, url, stock):
    asked = question(tmp_path, YES_NO, ("prompt", "source", "media_1"))
    one, before, *_ = pictures(2)
    logp, tokenizer = stock(asked, "less red", [[before], [one]])
    mass = []
    for label in asked.labels:
        ids = {tuple(tokenizer(s, add_special_tokens=False)["input_ids"]) for s in spellings(label, True)}
        mass.append(sum(float(logp[i[0]].exp()) for i in ids if len(i) == 1))
    assert len({tuple(tokenizer(s, add_special_tokens=False)["input_ids"]) for s in spellings("y", True)}) >= 2
    found = ask(url, asked, {"prompt": "less red"}, [one], [before], tokenizer=MODEL)
    assert found == pytest.approx(two(mass), abs=2e-3)


def test_a_pair_with_two_source_images(tmp_path, url, stock):
    asked = question(tmp_path, EDIT, ("prompt", "source", "media_1", "media_2"))
    a, b, *source = pictures(4)
    values = []
    for pair in ((a, b), (b, a)):
        logp, tokenizer = stock(asked, "less red", [source, [pair[0]], [pair[1]]])
        mass = [float(logp[tokenizer(s, add_special_tokens=False)["input_ids"][0]].exp()) for s in asked.labels]
        for changes in ({"tokenizer": MODEL}, {}):
            assert ask(url, asked, {"prompt": "less red"}, pair, source, **changes) == pytest.approx(
                two(mass), abs=2e-3
            )
        values.append(two(mass))
    assert abs(values[0] - values[1]) > 1e-3, "the order of the pictures matters, so equality says something"


def test_two_clips_are_sixteen_frames_in_order(tmp_path, url, stock):
    asked = question(tmp_path, CLIPS, ("prompt", "media_1", "media_2"))
    clips = [Media(np.stack([p.pixels for p in pictures(33, seed)])) for seed in (1, 2)]
    chosen = np.linspace(0, 32, 8, dtype=int)
    logp, tokenizer = stock(asked, "a cat", [[Media(c.pixels[k]) for k in chosen] for c in clips])
    mass = [float(logp[tokenizer(s, add_special_tokens=False)["input_ids"][0]].exp()) for s in asked.labels]
    assert ask(url, asked, {"prompt": "a cat"}, clips, tokenizer=MODEL) == pytest.approx(two(mass), abs=2e-3)


def test_a_model_that_writes_something_else_gives_missing_scores(url):
    """The demo's judge only knows how to compare, so nothing that it writes is a score."""
    judge = {"endpoints": [url], "image_format": "webp"}
    names = ["unifiedreward_alignment", "unifiedreward_style", "qwenvl", "edit_score", "grid_layout"]
    sample = Sample("a 2x2 grid", pictures(1)[0], tuple(pictures(1, 3)))
    for name, reward in build(names, {n: {"judge": judge} for n in names}).items():
        score = reward.score([sample])[0]
        assert score.value is None and ("expected" in score.reason or "label" in score.reason), (name, score)

"""The in-process judge against the stock model.

Oracle: transformers' own forward pass on one complete pair (no shared features, no shared KV cache), for both
families. Cases: square and mixed image sizes (several patch grids in one group), groups judged alone and together
with others, and prompts that contain the image token.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from reward_cases import stock_answer, tiny_judge
from servers import asker

from prefgrpo.data.media import Media
from prefgrpo.judge.event_loop import loop_thread
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.local import LocalJudge, label_ids
from prefgrpo.judge.template import Query, load_template
from prefgrpo.rewards.pairs import both_orders

SIZES = {"square": [(64, 64)] * 4, "mixed": [(64, 64), (64, 128), (96, 64), (40, 40)]}


@pytest.fixture(scope="module", params=["qwen3", "qwen25"])
def judge(request, tmp_path_factory):
    folder = tiny_judge(request.param, tmp_path_factory.mktemp(request.param))
    return opened(folder)


def opened(model, template="compare", **options):
    """A judge with random weights, which gives the labels little probability."""
    made = LocalJudge(str(model), **options)
    made.min_label_mass = 0.0
    return asker(made, template)


def _media(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [Media(rng.integers(0, 256, (*s, 3), dtype=np.uint8)) for s in sizes]


def _stock(asked, prompt, *media, source=()):
    """P(first label) from the stock forward pass on one question."""
    judge, (template, _) = asked
    turns = template.messages({"prompt": prompt}, len(source))
    p = stock_answer(judge.net, judge.tokenizer, judge.processor, turns, [*source, *media])
    one, two = (float(p[_spellings(judge, template, label)].sum()) for label in template.labels)
    return one / (one + two)


def _spellings(judge, template, label):
    """Ids of all vocabulary tokens that equal the label up to white space and, with `variants`, up to case."""
    plain = (lambda text: text.strip().lower()) if template.variants else str.strip
    texts = judge.tokenizer.batch_decode([[k] for k in range(len(judge.tokenizer))])
    return [k for k, text in enumerate(texts) if plain(text) == plain(label)]


@pytest.mark.parametrize("sizes", SIZES)
def test_equals_the_stock_forward_of_one_pair(judge, sizes):
    media, pairs = _media(SIZES[sizes]), both_orders(4, 0)
    found = [v.value for v in judge.judge_group('a {red} "circle"', media, pairs)]
    stock = [_stock(judge, 'a {red} "circle"', media[i], media[j]) for i, j in pairs]
    assert np.abs(np.subtract(found, stock)).max() < 1e-5
    assert np.ptp(found) > 1e-3  # the images matter, so equality is not trivial


def test_in_bf16_as_on_a_gpu(judge):
    """All of it runs in bf16, and verdicts differ from those of fp32 by its rounding."""
    low = opened(judge.judge.model, dtype=torch.bfloat16)
    assert {p.dtype for p in low.judge.net.parameters()} == {torch.bfloat16}
    media = _media(SIZES["mixed"])
    pairs = both_orders(4, 0)
    want, found = ([v.value for v in one.judge_group("a red circle", media, pairs)] for one in (judge, low))
    assert 0 < np.abs(np.subtract(found, want)).max() < 0.02


@pytest.mark.parametrize("variants", [False, True])
def test_all_spellings_of_a_label_count_together(judge, tmp_path, variants):
    path = tmp_path / "yes.yaml"
    path.write_text(f"user: '{{prompt}} {{media_1}} {{media_2}}'\nlabels: [a, i]\nvariants: {variants}\nprefill: 'I:'")
    own = opened(judge.judge.model, str(path))
    wanted = [_spellings(own.judge, own.templates.images, label) for label in "ai"]
    assert label_ids(own.judge.tokenizer, own.templates.images) == wanted
    assert len(wanted[0]) == (3 if variants else 2)
    media = _media(SIZES["square"])
    found = own.judge_group("a", media, [(0, 1)])[0].value
    assert found == pytest.approx(_stock(own, "a", media[0], media[1]), abs=1e-5)


@pytest.mark.parametrize("sources", [1, 2])
def test_pairs_of_edits_are_judged_beside_their_source(judge, tmp_path, sources):
    path = tmp_path / "edit.yaml"
    path.write_text("user: 'Do {prompt}: {source} 1: {media_1} 2: {media_2}'\nprefill: 'Image '\nlabels: ['1', '2']\n")
    edits = opened(judge.judge.model, template=str(path))
    media, pairs = _media(SIZES["mixed"]), both_orders(4, 0)
    source = _media([(96, 64), (64, 64)][:sources], seed=3)
    found = [v.value for v in edits.judge_group("less red", media, pairs, source)]
    stock = [_stock(edits, "less red", media[i], media[j], source=source) for i, j in pairs]
    assert np.abs(np.subtract(found, stock)).max() < 1e-5
    other = [v.value for v in edits.judge_group("less red", media, pairs, _media([(40, 40)], seed=4))]
    assert np.abs(np.subtract(found, other)).max() > 1e-4, "the source matters, so equality is not trivial"
    none = edits.judge_group("less red", media, pairs)
    assert {v.value for v in none} == {None} and "needs a source image" in none[0].reason
    path.write_text("user: '{prompt} {media_1} {source} {media_2}'\nlabels: ['1', '2']\n")
    with pytest.raises(JudgeError, match="source after"):
        judge.judge.check(load_template(str(path)))


@pytest.mark.parametrize("sources", [0, 1])
def test_a_question_about_one_image_equals_the_stock_forward(judge, tmp_path, sources):
    """As a reward that scores samples one by one asks it, with other texts than the prompt."""
    path = tmp_path / "one.yaml"
    path.write_text(f"user: 'Is it {{prompt}}? {'{source}' * sources} {{media_1}}'\nlabels: ['1', '2']\nprefill: 'I '")
    question = load_template(str(path), ("prompt", "media_1"))
    media = _media(SIZES["mixed"])
    source = _media([(96, 64)], seed=3) * sources
    queries = [Query(question, {"prompt": "red"}, (one,), source) for one in media]
    found = judge.judge.ask_all(queries)
    expected = [_stock((judge.judge, (question, question)), "red", one, source=source) for one in media]
    assert np.abs(np.subtract([answer.value for answer in found], expected)).max() < 1e-5
    assert loop_thread().submit(judge.judge.ask(queries[0])).result(60).value == pytest.approx(found[0].value, abs=1e-5)


def test_a_group_depends_on_itself_alone_and_on_the_batch_up_to_rounding(judge):
    media, pairs = _media(SIZES["square"]), both_orders(4, 0)
    alone = judge.judge_group("a", media, pairs)
    judge.judge_group("something else", _media(SIZES["mixed"], seed=1), pairs)
    again = judge.judge_group("a", media, pairs)
    assert [(v.raw, v.value) for v in alone] == [(v.raw, v.value) for v in again]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(judge.judge, "batch", 5)
        batched = judge.judge_group("a", media, pairs)
    assert np.abs(np.subtract([v.value for v in alone], [v.value for v in batched])).max() < 1e-5


def test_an_image_token_in_the_prompt_and_labels_without_probability_are_missing(judge):
    media = _media(SIZES["square"])
    verdicts = judge.judge_group("a <|image_pad|> cat", media, [(0, 1), (1, 2)])
    assert [v.value for v in verdicts] == [None, None]
    assert "special token <|image_pad|>" in verdicts[0].reason
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(judge.judge, "min_label_mass", 0.99)
        verdict = judge.judge_group("a", media, [(0, 1)])[0]
    assert verdict.value is None and "probability" in verdict.reason


def test_a_label_that_the_tokenizer_cannot_split_off_is_refused(judge):
    with pytest.raises(JudgeError, match="one more token"):
        label_ids(judge.judge.tokenizer, replace(judge.templates.images, prefill="Imag", labels=("e 1", "e 2")))


def test_a_chat_template_that_drops_the_images_is_refused(judge, tmp_path):
    folder = shutil.copytree(judge.judge.model, tmp_path / "textual")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}")
    with pytest.raises(JudgeError, match="wrote 0 images, expected 2"):
        opened(folder).judge_group("a", _media(SIZES["square"]), [(0, 1)])

"""The OCR demo: its world of words, the OCR package on clean drawings, and a short run of its recipe by the command.

Why these cases: the reward is a third-party package, so it must read correct drawings correctly, or training optimises
its mistakes; the metric reported in the docs must be independent of the reward and able to tell words apart; the
recipe's paths must work from a checkout. Expected words are those drawn; stock diffusers must repeat our images.
"""

import os

import numpy as np
import pytest
import torch
from ranks import start
from world import rows

from prefgrpo.config.loading import load
from prefgrpo.data.media import Media
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Sample
from scripts.demo_world import text
from scripts.demo_world.text import Letters

LETTERS = "scripts/demo_world/text.py:Letters"
SHORT = ["--eval.max-prompts", "2", "--eval.samples-per-prompt", "2", "--rollout.prompts-per-step", "2"]


def drawn(n, seed=0):
    images, codes = text.draw("train", n, torch.Generator().manual_seed(seed))
    return images, text.decode(codes)


def media(images):
    return [Media(image) for image in (images.permute(0, 2, 3, 1) * 255).round().byte().numpy()]


def _enter():
    os.chdir(os.environ["CHECKOUT"])


def train(root, place, *options):
    """Run the recipe from the checkout; returns the run folder."""
    argv = ["train", "scripts/demo/ocr.yaml", "--output", str(place), *SHORT, *options]
    run = start(argv, place / "train.log", _enter, CHECKOUT=str(root))
    assert run.wait(900) == 0, run.output
    return place / "demo-ocr", run.output


def test_the_prompts_are_three_sets_of_this_worlds_words(root):
    sets = {split: (root / f"scripts/demo/ocr/prompts/{split}.txt").read_text().splitlines() for split in text.SPLITS}
    assert sets == {split: text.prompts(split) for split in text.SPLITS}
    assert len(set.union(*map(set, sets.values()))) == sum(map(len, sets.values())) == 3000
    assert {len(text.parse_prompt(prompt)) for prompt in sets["test"]} == {2, 3, 4}
    for wrong in ("CAB", 'the word "A"', 'the word "CABAC"', 'the word "CÄB"', 'the word "cab"', '"CAB" or "BED"'):
        with pytest.raises(ValueError, match="expected a prompt such as"):
            text.parse_prompt(wrong)


def test_caption_noise_never_makes_a_held_out_word():
    torch.manual_seed(0)
    held = {*text.SPLITS["dev"], *text.SPLITS["test"]}
    words = [word for word in text.SPLITS["train"] if len(word) == 2]
    shown = text.decode(text.corrupt(text.encode(words * 20), 0.5))
    assert not held & set(shown) and set(map(len, shown)) == {2}
    changed = np.mean([a != b for a, b in zip("".join(words * 20), "".join(shown), strict=True)])
    assert 0.3 < changed < 0.5


def test_templates_read_every_clean_drawing_and_no_other_word():
    images, words = drawn(600)
    letters, right = text.hits(images, [text.prompt(word) for word in words])
    assert right.all() and (letters == 1).all()
    others = [word[:-1] + ("A" if word[-1] != "A" else "B") for word in words]
    letters, right = text.hits(images, [text.prompt(word) for word in others])
    assert not right.any() and letters.tolist() == pytest.approx([1 - 1 / len(word) for word in words])
    for spoilt in (torch.rand(50, 3, 16, 64), 1 - torch.zeros(50, 3, 16, 64), images[:50].flip(-2)):
        assert not text.hits(spoilt, [text.prompt("BEN")] * 50)[1].any()
    one, other = Letters().score([Sample(text.prompt(words[0]), media(images)[0]), Sample("a dog", media(images)[1])])
    assert (one.value, one.parts) == (1.0, {"all": 1.0}) and other.value is None


def test_the_ocr_package_reads_clean_drawings():
    images, words = drawn(60)
    reward = build("ocr", {"ocr": {"detect": False, "workers": 1}})["ocr"]
    samples = [Sample(text.prompt(word), one) for word, one in zip(words, media(images), strict=True)]
    scores = reward.score(samples)
    assert np.mean([score.parts["exact"] for score in scores]) > 0.95
    wrong = reward.score([Sample(text.prompt("BEN"), one) for one in media(images[:20])])
    blank = reward.score([Sample(text.prompt("BEN"), Media(np.full((16, 64, 3), 40, np.uint8)))])
    assert all(s.parts["exact"] == 0 for s in wrong) and blank[0].value == 0.0
    reward.close()


def test_the_check_is_never_the_reward(root):
    config = load(root / "scripts/demo/ocr.yaml")
    assert [entry.name for entry in config.rewards] == ["ocr"]
    assert [entry.name for entry in config.measured] == ["ocr", LETTERS] and config.measured[0] == config.rewards[0]


@pytest.mark.full
def test_one_step_and_its_evaluation(root, tmp_path):
    folder, _ = train(root, tmp_path, "--train.steps", "1", "--eval.prompts", "0")
    (step,) = [row for row in rows(folder) if row["kind"] == "train"]
    assert step["reward/missing"] == 0 and 0 <= step["reward/ocr"] <= 1
    assert step["policy/on_policy_error"] <= 1e-6
    last = rows(folder)[-1]
    assert (last["kind"], last["set"], last["step"]) == ("eval", "test", 1)
    for name in ("ocr", "ocr.exact", LETTERS, f"{LETTERS}.all"):
        assert 0 <= last[f"test/{name}_before"] <= 1 and 0 <= last[f"test/{name}"] <= 1

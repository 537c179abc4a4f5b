"""imagereward and deqa on tiny random checkpoints in their published formats.

Why these cases: each score depends on details whose errors raise nothing (resizing, masked padding, the levels' order,
the image's place in the question). Oracles: BLIP's forward in plain float64 from the checkpoint's tensor names,
torchvision for resizing, sums by hand. These rewards were once compared with the package image-reward 1.5 and the code
of DeQA-Score, outside the repository: docs/rewards.md. CI runs a stub of the code of deqa's model.
"""

from pathlib import Path

import numpy as np
import pytest
import reward_cases as own
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from world import noise

from prefgrpo.rewards.base import RewardError, Sample
from prefgrpo.rewards.deqa import IMAGE, LEVELS, QUESTION, DeQA, score_from_logits, square
from prefgrpo.rewards.imagereward import CENTRE, SCALE, ImageReward


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    return own.imagereward(tmp_path_factory.mktemp("blip"))


@pytest.fixture(scope="module")
def owl(tmp_path_factory):
    return own.deqa(tmp_path_factory.mktemp("owl"))


# ---------------------------------------------------------------- imagereward


def by_hand(tensors, ids, mask, pixels, text_heads=4):
    """BLIP's forward and the head in plain float64 torch, from the checkpoint's tensor names."""
    t = {k: v.double() if v.is_floating_point() else v for k, v in tensors.items()}

    def linear(x, name):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(x, name, eps):
        return nn.functional.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps)

    def attend(q, k, v, heads, hidden=None):
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(-3, -2) for x in (q, k, v))
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        logits = logits if hidden is None else logits.masked_fill(hidden, -1e9)
        return (logits.softmax(-1) @ v).transpose(-3, -2).flatten(-2)

    at = "blip.visual_encoder"
    x = nn.functional.conv2d(pixels.double(), t[f"{at}.patch_embed.proj.weight"], t[f"{at}.patch_embed.proj.bias"], 16)
    x = torch.cat([t[f"{at}.cls_token"][0], x.flatten(1).T]) + t[f"{at}.pos_embed"][0]
    for k in range(2):
        block = f"{at}.blocks.{k}"
        q, key, v = linear(norm(x, f"{block}.norm1", 1e-6), f"{block}.attn.qkv").chunk(3, -1)
        x = x + linear(attend(q, key, v, x.shape[-1] // 64), f"{block}.attn.proj")
        y = nn.functional.gelu(linear(norm(x, f"{block}.norm2", 1e-6), f"{block}.mlp.fc1"))
        x = x + linear(y, f"{block}.mlp.fc2")
    seen = norm(x, f"{at}.norm", 1e-6)
    at = "blip.text_encoder"
    words, places = (t[f"{at}.embeddings.{k}_embeddings.weight"] for k in ("word", "position"))
    x = norm(words[ids] + places[: len(ids)], f"{at}.embeddings.LayerNorm", 1e-12)
    for k in range(2):
        layer = f"{at}.encoder.layer.{k}"
        for kind, other, hidden in (("attention", None, mask == 0), ("crossattention", seen, None)):
            other, where = x if other is None else other, f"{layer}.{kind}"
            parts = [linear(x, f"{where}.self.query"), *(linear(other, f"{where}.self.{n}") for n in ("key", "value"))]
            x = norm(
                x + linear(attend(*parts, text_heads, hidden), f"{where}.output.dense"),
                f"{where}.output.LayerNorm",
                1e-12,
            )
        y = linear(nn.functional.gelu(linear(x, f"{layer}.intermediate.dense")), f"{layer}.output.dense")
        x = norm(x + y, f"{layer}.output.LayerNorm", 1e-12)
    x = x[0]
    for k in (0, 2, 4, 6, 7):
        x = linear(x, f"mlp.layers.{k}")
    return float((x[0] - CENTRE) / SCALE)


def test_imagereward_against_its_formula_in_float64(blip):
    reward = ImageReward(**blip, batch_size=2)
    tensors = torch.load(Path(blip["model"]) / "ImageReward.pt")
    samples = [Sample(p, noise(k, 40 + 20 * k, 56)) for k, p in enumerate([*own.OWN_PROMPTS, "long " * 60])]
    for sample, score in zip(samples, reward.score(samples), strict=True):
        words = reward.tokenize(
            sample.prompt, padding="max_length", truncation=True, max_length=35, return_tensors="pt"
        )
        ids, mask = words["input_ids"][0], words["attention_mask"][0]
        expected = by_hand(tensors, ids, mask, reward.preprocess(sample.media.pil))
        assert score.value == pytest.approx(expected, abs=1e-4)


def test_imagereward_without_a_weight_or_with_pickled_code_is_refused(blip, tmp_path):
    tensors = torch.load(Path(blip["model"]) / "ImageReward.pt")
    own.write(tmp_path / "med_config.json", (Path(blip["model"]) / "med_config.json").read_text())
    absent = {"blip.visual_encoder.norm.weight": "missing_keys.*post_layernorm", "mlp.layers.2.bias": "bias"}
    cases = [({k: v for k, v in tensors.items() if k != name}, message) for name, message in absent.items()]
    for content, message in (*cases, ({"blip": Path("/")}, "cannot load")):
        torch.save(content, tmp_path / "ImageReward.pt")
        with pytest.raises(RewardError, match=message):
            ImageReward(**{**blip, "model": str(tmp_path)})


# ---------------------------------------------------------------- deqa


def test_deqa_levels_by_hand():
    """Logits ln 1 … ln 5 are probabilities 1/15 … 5/15; level = (5·1 + 4·2 + 3·3 + 2·4 + 1·5)/15 = 35/15."""
    score = score_from_logits(torch.log(torch.tensor([1.0, 2, 3, 4, 5])))
    assert score.value == pytest.approx(35 / 15 / 5) and score.parts["level"] == pytest.approx(35 / 15)
    assert score.parts["excellent"] == pytest.approx(1 / 15) and score.parts["bad"] == pytest.approx(1 / 3)
    assert score_from_logits(torch.tensor([100.0, 0, 0, 0, 0])).value == pytest.approx(1.0)
    assert score_from_logits(torch.tensor([0.0, 0, 0, 0, 100])).value == pytest.approx(0.2)


def test_deqa_asks_the_published_question_through_the_models_own_code(owl):
    """The stub's logits are linear in the mean colour of the padded square."""
    reward = DeQA(**owl, batch_size=2)
    words = ["<s>", *QUESTION.replace(IMAGE, "IMAGE").split()]
    said = [("IMAGE" if k == -200 else reward.tokenizer.convert_ids_to_tokens(k)) for k in reward.question]
    assert said == words and words[11:13] == ["IMAGE", "ASSISTANT:"]
    assert reward.tokenizer.convert_ids_to_tokens(reward.levels) == list(LEVELS)
    samples = [Sample("not asked about", noise(k, 40, 40 + 20 * k)) for k in range(3)]
    weights = load_file(Path(owl["model"]) / "model.safetensors")
    for sample, score in zip(samples, reward.score(samples), strict=True):
        shown = square(sample.media.pil, (122, 117, 104))  # 255 · mean, truncated
        pixels = reward.processor(shown, return_tensors="pt")["pixel_values"][0]
        logits = weights["colour.weight"] @ pixels.mean((1, 2)) + weights["colour.bias"]
        expected = torch.softmax(logits[reward.levels].double(), 0) @ torch.tensor([5.0, 4, 3, 2, 1]).double()
        assert score.value == pytest.approx(float(expected) / 5, abs=1e-6)


def test_deqa_executes_no_code_of_an_unpinned_repository():
    for revision in ("", "@main"):
        with pytest.raises(RewardError, match=r"executes code .* with the commit"):
            DeQA(model=f"zhiyuanyou/DeQA-Score-Mix3{revision}")


def test_deqa_pads_to_a_square_in_the_middle():
    picture = square(Image.fromarray(np.full((10, 30, 3), 200, np.uint8)), (1, 2, 3))
    pixels = np.array(picture)
    assert pixels.shape == (30, 30, 3) and (pixels[10:20] == 200).all()
    assert (pixels[:10] == (1, 2, 3)).all() and (pixels[20:] == (1, 2, 3)).all()
    assert square(Image.fromarray(np.full((30, 10, 3), 200, np.uint8)), (1, 2, 3)).size == (30, 30)

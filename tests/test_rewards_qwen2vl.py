"""hpsv3 and videoalign, the two rewards that are a Qwen2-VL with a head, on tiny random checkpoints in their formats.

Why these cases: each score depends on details whose errors raise nothing (sequential text positions, which token is
read, LoRA scaling, the frames and sizes the model sees). Oracles: transformers' own Qwen2-VL called another way, its
image processor and sizes, peft for LoRA, torchvision for resizing. These rewards were once compared with the package
hpsv3 1.0.0 and the code of VideoAlign, outside the repository: docs/rewards.md.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import reward_cases_own as own
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_media import noise
from torch import nn

from prefgrpo.rewards.base import RewardError, Sample
from prefgrpo.rewards.checkpoints import merge_lora
from prefgrpo.rewards.qwen2vl import (
    PIXELS,
    HPSv3,
    VideoAlign,
    chat,
    fit,
    frame,
    frame_count,
    normalised,
    patches,
    resized,
)  # fmt: skip


@pytest.fixture(scope="module")
def hps(tmp_path_factory):
    return own.hpsv3(tmp_path_factory.mktemp("hps"))


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    return own.videoalign(tmp_path_factory.mktemp("video"))


# ---------------------------------------------------------------- inputs of a Qwen2-VL


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_patches_are_those_of_the_published_processors(count):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = noise(0, 56, 84, count).pixels
    rows, grid = patches(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert grid.tolist() == [(count + 1) // 2, 4, 6] and rows.shape == (grid.prod(), 1176)
    processor = Qwen2VLImageProcessorPil(do_resize=False)
    if count == 1:
        expected = processor(Image.fromarray(pixels[0]), return_tensors="pt")["pixel_values"]
    else:  # a row holds two frames: the first and second half of what the processor makes of each alone
        even = [*pixels, pixels[-1]] if count % 2 else list(pixels)
        each = [processor(Image.fromarray(f), return_tensors="pt")["pixel_values"].view(24, 3, 2, 196) for f in even]
        pairs = [torch.cat([a[:, :, :1], b[:, :, 1:]], 2) for a, b in zip(each[::2], each[1::2], strict=True)]
        expected = torch.cat(pairs).reshape(-1, 1176)
    assert torch.allclose(rows, expected, atol=1e-5)


def test_the_chat_format_is_qwens():
    assert chat("image", 2, "Hi") == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>Hi<|im_end|>\n<|im_start|>assistant\n"
    )


def reference(options, tensors, head, turns, tokens, kind):
    """Head outputs on transformers' Qwen2VLForConditionalGeneration, one turn at a time, without padding."""
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig.from_pretrained(options["base"])
    config.text_config.vocab_size = len(tensors["model.embed_tokens.weight"])
    model = Qwen2VLForConditionalGeneration.from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(options["base"])
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    found = []
    for frames, text in turns:
        rows, grid = patches(frames)
        ids = tokenizer(chat(kind, len(rows) // 4, text), return_tensors="pt").input_ids
        names = ("pixel_values", "image_grid_thw") if kind == "image" else ("pixel_values_videos", "video_grid_thw")
        places = torch.arange(ids.shape[1]).expand(3, 1, -1)
        with torch.no_grad():
            out = model(ids, position_ids=places, output_hidden_states=True, **dict(zip(names, (rows, grid[None]))))
        at = [int((ids[0] == tokenizer.convert_tokens_to_ids(t)).nonzero()[-1]) for t in tokens]
        found.append(head(out.hidden_states[-1][0, at]).detach())
    return torch.stack(found).numpy()


# ---------------------------------------------------------------- hpsv3


def test_hpsv3_is_the_head_at_the_reward_token(hps):
    tensors = load_file(Path(hps["model"]) / "HPSv3.safetensors")
    head = nn.Sequential(
        nn.Linear(32, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )
    head.load_state_dict({k.removeprefix("rm_head."): v for k, v in tensors.items() if k.startswith("rm_head")})
    body = {k: v for k, v in tensors.items() if not k.startswith("rm_head")}
    samples = [Sample(p, noise(k, 60 + 90 * k, 200)) for k, p in enumerate(own.PROMPTS)]
    turns = [(frame(s.media.pil, PIXELS), own.HPS_TEXT.replace("{text_prompt}", s.prompt)) for s in samples]
    expected = reference(hps, body, head.eval(), turns, ["<|Reward|>"], "image")[:, 0]
    scores = HPSv3(**hps, batch_size=2).score(samples)
    got = np.array([[s.value, s.parts["sigma"]] for s in scores])
    assert np.allclose(got, expected, atol=2e-5)
    assert got[:, 0].std() > 0.05  # scores must depend on images and prompts


def test_one_bad_sample_is_missing_and_the_others_are_scored(hps):
    """Reward tokens in a prompt would be read in place of the template's; a one-line sliver has no patches."""
    bad = [Sample("a <|Reward|>", noise(0)), Sample("a <|image_pad|>", noise(0))]
    bad.append(Sample("a line", noise(0, 2, 500)))
    scores = HPSv3(**hps).score([*bad, Sample(own.PROMPTS[0], noise(0))])
    assert [s.value is None for s in scores] == [True, True, True, False]
    assert "<|Reward|>" in scores[0].reason and "<|image_pad|>" in scores[1].reason and "1:200" in scores[2].reason


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing_keys"),
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "unexpected_keys"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), "size|mismatch|shape"),
        (lambda t: [t.pop(k) for k in list(t) if k.startswith("rm_head")], "reward head"),
        (lambda t: t.update({"model.embed_tokens.weight": torch.ones(200, own.WIDTH)}), "has 200 tokens"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(hps, tmp_path, change, why):
    tensors = load_file(Path(hps["model"]) / "HPSv3.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "HPSv3.safetensors")
    with pytest.raises(RewardError, match=why):
        HPSv3(**{**hps, "model": str(tmp_path)})


# ---------------------------------------------------------------- videoalign


def raw(video, samples):
    """Raw head outputs with the LoRA weights merged by peft."""
    tensors = torch.load(Path(video["model"]) / "checkpoint-7" / "model.pth")
    plain = by_peft(tensors)
    head = nn.Linear(own.WIDTH, 3, bias=False)
    head.load_state_dict({"weight": plain.pop("rm_head.weight")})
    turns = []
    for s in samples:
        chosen = np.linspace(0, len(s.media.pixels) - 1, frame_count(len(s.media.pixels), 16.0, 2.0, None)).round()
        frames = torch.from_numpy(s.media.pixels[chosen.astype(int)]).permute(0, 3, 1, 2)
        turns.append((resized(frames, 8 * 784), own.VIDEO_TEXT.replace("{text_prompt}", s.prompt)))
    return reference(video, plain, head, turns, [f"<|{p}_reward|>" for p in ("VQ", "MQ", "TA")], "video")


def by_peft(tensors):
    """Plain weights, merged by peft's own LoRA layer."""
    from peft.tuners.lora import Linear as Lora

    plain = {k.removeprefix("base_model.model."): v for k, v in tensors.items()}
    for stem in [k.removesuffix(".lora_A.default.weight") for k in plain if k.endswith("lora_A.default.weight")]:
        out, inner = plain[f"{stem}.base_layer.weight"].shape
        layer = nn.Linear(inner, out, bias=False)
        layer.weight.data = plain.pop(f"{stem}.base_layer.weight").clone()
        from peft import LoraConfig

        lora = Lora(layer, "default", LoraConfig(r=own.RANK, lora_alpha=own.ALPHA), r=own.RANK, lora_alpha=own.ALPHA)
        lora.lora_A["default"].weight.data = plain.pop(f"{stem}.lora_A.default.weight")
        lora.lora_B["default"].weight.data = plain.pop(f"{stem}.lora_B.default.weight")
        lora.merge()
        plain[f"{stem}.weight"] = lora.base_layer.weight.data
    return {k.replace(".base_layer.", "."): v for k, v in plain.items()}


def test_videoalign_is_three_heads_at_three_tokens_normalised(video):
    samples = [Sample(p, noise(k, frames=n)) for k, (p, n) in enumerate(zip(own.PROMPTS, (9, 32, 2), strict=True))]
    expected = np.stack([np.diagonal(rows) for rows in raw(video, samples)])
    scores = VideoAlign(**video, batch_size=2).score(samples)
    for score, (vq, mq, ta) in zip(scores, expected, strict=True):
        parts = {"VQ": (vq - 3.5) / 2.0, "MQ": (mq - 1.25) / 1.5, "TA": (ta - 2.75) / 2.5}
        assert score.parts == pytest.approx(parts, abs=5e-5)
        assert score.value == pytest.approx(sum(parts.values()), abs=1e-4)


def test_videoalign_of_some_dimensions(video):
    """DanceGRPO trains HunyuanVideo on VQ alone, with clips written at 8 frames per second."""
    samples = [Sample(p, noise(k, frames=20)) for k, p in enumerate(own.PROMPTS)]
    every = VideoAlign(**video).score(samples)
    for chosen in (["VQ"], ["TA", "MQ"]):
        found = VideoAlign(**video, dimensions=chosen).score(samples)
        assert [s.value for s in found] == pytest.approx([sum(s.parts[k] for k in chosen) for s in every], abs=1e-6)
        assert [s.parts for s in found] == [s.parts for s in every]


@pytest.mark.parametrize("outputs", [1, 3])
def test_adapters_and_a_full_file_give_the_same(outputs, tmp_path):
    """An adapter checkpoint takes other weights from the base; one output per token or the diagonal of three."""
    samples = [Sample(own.PROMPTS[0], noise(0, frames=9))]
    scores = [
        VideoAlign(**own.videoalign(tmp_path / str(full), full, outputs)).score(samples)[0].parts
        for full in (True, False)
    ]
    assert scores[0] == scores[1] and len(set(scores[0].values())) == 3


def test_the_newest_checkpoint_is_used(tmp_path):
    options, samples = own.videoalign(tmp_path), [Sample("a", noise(0, frames=9))]
    first = VideoAlign(**options).score(samples)
    old, new = (Path(options["model"]) / f"checkpoint-{k}" for k in (7, 10))
    new.mkdir()
    tensors, head = torch.load(old / "model.pth"), "base_model.model.rm_head.weight"
    torch.save(tensors | {head: tensors[head] + 1}, new / "model.pth")
    assert VideoAlign(**options).score(samples) != first


@pytest.mark.parametrize(
    ("total", "video_fps", "fps", "frames", "expected"),
    [(33, 16.0, 2.0, None, 4), (81, 16.0, 2.0, None, 10), (2, 16.0, 2.0, None, 2), (3, 16.0, 2.0, None, 2),
     (5, 16.0, 2.0, None, 4), (9, 16.0, 30.0, None, 8), (90, 30.0, None, None, 6), (2000, 1.0, 2.0, None, 768),
     (40, 16.0, None, 8, 8), (40, 16.0, None, 7, 8), (5, 16.0, None, 8, 5), (53, 16.0, 2.0, None, 6),
     (53, 8.0, 2.0, None, 14)],
)  # fmt: skip
def test_how_many_frames(total, video_fps, fps, frames, expected):
    """seconds × rate, at least 4, at most 768 or all frames, rounded to an even number: 81/16·2 = 10.1 → 10."""
    assert frame_count(total, video_fps, fps, frames) == expected


def test_frames_are_resized_as_torchvision_does():
    transforms = pytest.importorskip("torchvision.transforms")
    frames = torch.from_numpy(noise(0, 200, 320, 3).pixels).permute(0, 3, 1, 2)
    for most in (8 * 784, 200704):
        size = list(fit(200, 320, 128 * 784, most))
        bicubic = transforms.InterpolationMode.BICUBIC
        expected = transforms.functional.resize(frames, size, interpolation=bicubic, antialias=True).float()
        assert torch.equal(resized(frames, most), expected)


def test_without_published_figures_the_parts_are_raw():
    assert normalised([1.0, 2.0, 3.0], None) == {"VQ": 1.0, "MQ": 2.0, "TA": 3.0}
    assert normalised([5.5, 2.75, 0.25], own.NORMS) == {"VQ": 1.0, "MQ": 1.0, "TA": -1.0}


def test_what_is_no_clip_is_missing(video):
    scores = VideoAlign(**video).score(
        [Sample("a", noise(0)), Sample("a", noise(0, frames=1)), Sample("a", noise(0, frames=9))]
    )
    assert [s.value is None for s in scores] == [True, True, False] and "2 frames" in scores[1].reason


@pytest.mark.parametrize("names", [("x.weight", "x.lora_embedding_A"), ("x.lora_A.weight", "x.lora_B.weight")])
def test_lora_that_is_no_linear_pair_is_refused(names):
    with pytest.raises(RewardError, match="LoRA pairs"):
        merge_lora(dict.fromkeys(names, torch.ones(2, 2)), 1.0)


def test_the_training_text_comes_from_the_repositorys_file_or_a_text(tmp_path, video):
    file = own.write(tmp_path / "prompt_template.py", f"DETAILED_PROMPT_WITH_SPECIAL_TOKEN = {own.VIDEO_TEXT!r}\n")
    assert VideoAlign(**{**video, "template": str(file)}).text == own.VIDEO_TEXT == VideoAlign(**video).text
    with pytest.raises(RewardError, match=r"setup_reward\.sh videoalign"):
        VideoAlign(**{**video, "template": ""})


def test_a_videoreward_of_another_kind_is_refused(tmp_path):
    options = own.videoalign(tmp_path)
    file = Path(options["model"]) / "model_config.json"
    config = json.loads(file.read_text())
    config["model_config"]["use_special_tokens"] = False
    own.write(file, config)
    with pytest.raises(RewardError, match="reward tokens"):
        VideoAlign(**options)

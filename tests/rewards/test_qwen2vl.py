"""hpsv3 and videoalign, the two rewards that are a Qwen2-VL with a head, on tiny random checkpoints in their formats.

Why these cases: each score depends on details whose errors raise nothing (sequential text positions, which token is
read, LoRA scaling, the frames and sizes the model sees). Oracles: transformers' own Qwen2-VL called another way, its
image processor and sizes, peft for LoRA, torchvision for resizing. These rewards were once compared with the package
hpsv3 1.0.0 and the code of VideoAlign, outside the repository: docs/rewards.md.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reward_cases as own
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as Lora
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.transforms import Resize
from world import noise

from prefgrpo.rewards.base import RewardError, Sample
from prefgrpo.rewards.qwen2vl import HPSv3, VideoAlign, chat, frame_count
from prefgrpo.rewards.weights import merge_lora


@pytest.fixture(scope="module")
def hps(tmp_path_factory):
    return own.hpsv3(tmp_path_factory.mktemp("hps"))


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    return own.videoalign(tmp_path_factory.mktemp("video"))


def test_the_chat_format_is_qwens():
    assert chat("image", 2, "Hi") == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>Hi<|im_end|>\n<|im_start|>assistant\n"
    )


def reference(options, tensors, head, turns, tokens, kind):
    """Head outputs on transformers' Qwen2VLForConditionalGeneration with its own processors of images and clips, one
    turn (uint8 frames [F, 3, H, W], text) at a time, without padding."""
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = Qwen2VLConfig.from_pretrained(options["base"])
    config.text_config.vocab_size = len(tensors["model.embed_tokens.weight"])
    model = Qwen2VLForConditionalGeneration.from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(options["base"])
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    found = []
    for frames, text in turns:
        if kind == "image":
            picture = Image.fromarray(frames[0].permute(1, 2, 0).numpy())
            seen = dict(Qwen2VLImageProcessorPil(do_resize=False)(picture, return_tensors="pt"))
        else:
            seen = dict(Qwen2VLVideoProcessor(do_resize=False, do_sample_frames=False)(frames, return_tensors="pt"))
        count = int(seen[f"{kind}_grid_thw"].prod()) // 4
        ids = tokenizer(chat(kind, count, text), return_tensors="pt").input_ids
        places = torch.arange(ids.shape[1]).expand(3, 1, -1)
        with torch.no_grad():
            out = model(ids, position_ids=places, output_hidden_states=True, **seen)
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
    samples = [Sample(p, noise(k, 60 + 90 * k, 200)) for k, p in enumerate(own.OWN_PROMPTS)]
    reward = HPSv3(**hps, batch_size=2)
    turns = [(reward._frames(s), own.HPS_TEXT.replace("{text_prompt}", s.prompt)) for s in samples]
    expected = reference(hps, body, head.eval(), turns, ["<|Reward|>"], "image")[:, 0]
    scores = reward.score(samples)
    got = np.array([[s.value, s.parts["sigma"]] for s in scores])
    assert np.allclose(got, expected, atol=2e-5)
    assert got[:, 0].std() > 0.05  # scores must depend on images and prompts


def test_one_bad_sample_is_missing_and_the_others_are_scored(hps):
    """Reward tokens in a prompt would be read in place of the template's; a one-line sliver has no patches."""
    bad = [Sample("a <|Reward|>", noise(0)), Sample("a <|image_pad|>", noise(0))]
    bad.append(Sample("a line", noise(0, 2, 500)))
    scores = HPSv3(**hps).score([*bad, Sample(own.OWN_PROMPTS[0], noise(0))])
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


def raw(reward, options, samples):
    """Raw head outputs with the LoRA weights merged by peft."""
    tensors = torch.load(Path(options["model"]) / "checkpoint-7" / "model.pth")
    plain = by_peft(tensors)
    head = nn.Linear(own.WIDTH, 3, bias=False)
    head.load_state_dict({"weight": plain.pop("rm_head.weight")})
    turns = [(reward._frames(s), own.VIDEO_TEXT.replace("{text_prompt}", s.prompt)) for s in samples]
    return reference(options, plain, head, turns, [f"<|{p}_reward|>" for p in ("VQ", "MQ", "TA")], "video")


def by_peft(tensors):
    """Plain weights, merged by peft's own LoRA layer."""
    plain = {k.removeprefix("base_model.model."): v for k, v in tensors.items()}
    for stem in [k.removesuffix(".lora_A.default.weight") for k in plain if k.endswith("lora_A.default.weight")]:
        out, inner = plain[f"{stem}.base_layer.weight"].shape
        layer = nn.Linear(inner, out, bias=False)
        layer.weight.data = plain.pop(f"{stem}.base_layer.weight").clone()
        lora = Lora(layer, "default", LoraConfig(r=own.RANK, lora_alpha=own.ALPHA), r=own.RANK, lora_alpha=own.ALPHA)
        lora.lora_A["default"].weight.data = plain.pop(f"{stem}.lora_A.default.weight")
        lora.lora_B["default"].weight.data = plain.pop(f"{stem}.lora_B.default.weight")
        lora.merge()
        plain[f"{stem}.weight"] = lora.base_layer.weight.data
    return {k.replace(".base_layer.", "."): v for k, v in plain.items()}


def test_videoalign_is_three_heads_at_three_tokens_normalised(video):
    samples = [Sample(p, noise(k, frames=n)) for k, (p, n) in enumerate(zip(own.OWN_PROMPTS, (9, 32, 2), strict=True))]
    reward = VideoAlign(**video, batch_size=2)
    expected = np.stack([np.diagonal(rows) for rows in raw(reward, video, samples)])
    scores = reward.score(samples)
    for score, (vq, mq, ta) in zip(scores, expected, strict=True):
        parts = {"VQ": (vq - 3.5) / 2.0, "MQ": (mq - 1.25) / 1.5, "TA": (ta - 2.75) / 2.5}
        assert score.parts == pytest.approx(parts, abs=5e-5)
        assert score.value == pytest.approx(sum(parts.values()), abs=1e-4)


def test_videoalign_of_some_dimensions(video):
    """DanceGRPO trains HunyuanVideo on VQ alone, with clips written at 8 frames per second."""
    samples = [Sample(p, noise(k, frames=20)) for k, p in enumerate(own.OWN_PROMPTS)]
    every = VideoAlign(**video).score(samples)
    for chosen in (["VQ"], ["TA", "MQ"]):
        found = VideoAlign(**video, dimensions=chosen).score(samples)
        assert [s.value for s in found] == pytest.approx([sum(s.parts[k] for k in chosen) for s in every], abs=1e-6)
        assert [s.parts for s in found] == [s.parts for s in every]


@pytest.mark.parametrize(
    ("total", "video_fps", "fps", "expected"),
    [(33, 16.0, 2.0, 4), (81, 16.0, 2.0, 10), (2, 16.0, 2.0, 2), (3, 16.0, 2.0, 2), (5, 16.0, 2.0, 4),
     (9, 16.0, 30.0, 8), (2000, 1.0, 2.0, 768), (53, 16.0, 2.0, 6), (53, 8.0, 2.0, 14)],
)  # fmt: skip
def test_how_many_frames(total, video_fps, fps, expected):
    """seconds × rate, at least 4, at most 768 or all frames, rounded to an even number: 81/16·2 = 10.1 → 10."""
    assert frame_count(total, video_fps, fps) == expected


def test_the_published_frames_and_size(video):
    """Frames 0, 11, 21 and 32 of 33, in multiples of 28 pixels, at most 8 · 28² of them."""
    shown = VideoAlign(**video)._frames(Sample("a", noise(0, 100, 160, 33)))
    pixels = torch.from_numpy(noise(0, 100, 160, 33).pixels[[0, 11, 21, 32]]).permute(0, 3, 1, 2)
    assert torch.equal(shown, Resize([56, 84], interpolation=3, antialias=True)(pixels))


@pytest.mark.parametrize(
    ("option", "rate", "used"), [(None, 24.0, 24.0), (None, 8.0, 8.0), (12.0, 24.0, 12.0), (12.0, None, 12.0)]
)
def test_the_frame_rate_is_the_clips_own_unless_given(video, option, rate, used):
    clip = replace(noise(0, 56, 56, 60), frame_rate=rate)
    reward = VideoAlign(**video, **({"video_fps": option} if option else {}))
    seconds = 60 / used
    assert len(reward._frames(Sample("a", clip))) == round(seconds * 2 / 2) * 2, "2 frames per second, an even number"
    assert reward.score([Sample("a", clip)])[0].value is not None


def test_a_clip_without_a_frame_rate_is_missing_not_16(video):
    (score,) = VideoAlign(**video).score([Sample("a", replace(noise(0, frames=9), frame_rate=None))])
    assert score.value is None and "no frame rate: give videoalign the option video_fps" in score.reason


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

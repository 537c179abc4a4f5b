"""docs/extend.md, followed to the letter for a family that the package does not have: AuraFlow.

Why this case: the guide only holds if one new file is enough to get every feature of the built-in families. The family
is defined here, in fewer than 80 lines, and goes through the same oracles, a training run, a generation and a plan.
"""

import inspect

import pytest
import yaml
from world import Case, rows, settings

from prefgrpo import models
from prefgrpo.commands.cli import main
from prefgrpo.models.base import Adapter, Condition
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.vae import decode_image, encode
from prefgrpo.tiny import pipelines
from tests.models import test_families as oracles


class AuraFlow(Adapter):
    """AuraFlow text-to-image: latents [C, h, w], time = σ, classifier-free guidance 3.5, zeroed padding."""

    pipeline = "AuraFlowPipeline"
    cfg = Cfg()
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")

    def encode_prompt(self, prompt, max_length):
        embeds, _, _, _ = self.pipe.encode_prompt(
            prompt, do_classifier_free_guidance=False, device=self.device, max_sequence_length=max_length
        )
        return Condition(embeds[0])

    def schedule_options(self, sampling):
        return {}  # the scheduler's own sigmas

    def predict(self, net, x, sigma, condition, sampling):
        time = sigma * 1000 / 1000
        return net(x, encoder_hidden_states=condition.prompt_embeds, timestep=time, return_dict=False)[0]

    def decode(self, latents, sampling):
        return decode_image(self.pipe, latents / self.pipe.vae.config.scaling_factor)

    def latents_of(self, pixels):
        return encode(self.pipe.vae, pixels) * self.pipe.vae.config.scaling_factor


TINY = ("AuraFlowPipeline", {
    "transformer": ("AuraFlowTransformer2DModel", {
        **pipelines.BLOCKS, "sample_size": 16, "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 1,
        "num_single_dit_layers": 1, "pos_embed_max_size": 256, "caption_projection_dim": 32,
        "joint_attention_dim": pipelines.WIDTH,
    }),
    "scheduler": pipelines.flow(shift=1.73), "vae": pipelines.KL_VAE,
    "tokenizer": pipelines.t5_tokenizer, "text_encoder": ("UMT5EncoderModel", pipelines.T5),
})  # fmt: skip
CASE = Case("aura_flow", {"guidance_scale": 3.5, "max_sequence_length": 32}, 3.5)


@pytest.fixture(autouse=True)
def added(monkeypatch):
    """The two lines that the guide adds to the package's tables."""
    monkeypatch.setitem(models.MODELS, "aura_flow", f"{__name__}:AuraFlow")
    monkeypatch.setitem(pipelines.FAMILIES, "aura_flow", TINY)


def test_the_family_is_short():
    assert len(inspect.getsource(AuraFlow).splitlines()) < 60


def test_it_passes_the_oracles_of_every_family(tmp_path):
    oracles.test_noise_zero_is_the_stock_pipeline(CASE, "published keys")
    oracles.test_the_first_ratio_is_one_and_the_gradient_that_of_a_normal(CASE)
    oracles.test_a_batch_is_its_samples(CASE)
    oracles.test_cached_embeddings_are_the_encoded_ones(CASE, tmp_path / "cache")
    oracles.test_full_fine_tune_loads_in_stock_diffusers(CASE, tmp_path)


def test_it_trains_and_generates(tmp_path):
    """Named by its path, without a line in the package's table."""
    pipelines.make("aura_flow", tmp_path / "model")
    for name in ("train", "dev"):
        (tmp_path / f"{name}.txt").write_text("a red circle\na blue square\n")
    by_path = {"family": f"{__file__}:AuraFlow", "model": str(tmp_path / "model")}
    content = settings(tmp_path, "run", train={"steps": 3}) | by_path
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    assert main(["train", str(tmp_path / "r.yaml")]) == 0
    assert [r["policy/on_policy_error"] for r in rows(tmp_path / "runs" / "run") if r["kind"] == "train"] == [0.0] * 3
    argv = ["--lora", str(tmp_path / "runs" / "run"), "--out", str(tmp_path / "out"), "--samples", "1"]
    assert main(["generate", str(tmp_path / "r.yaml"), *argv]) == 0
    assert len(list((tmp_path / "out").glob("*.png"))) == 2


def test_a_wrong_convention_is_found(monkeypatch):
    """The oracles do catch mistakes: with another family's spacing of sigmas the first of them fails."""
    monkeypatch.setattr(AuraFlow, "schedule_options", Adapter.schedule_options)
    with pytest.raises(AssertionError):
        oracles.test_noise_zero_is_the_stock_pipeline(CASE, "published keys")


def test_a_file_that_is_none():
    with pytest.raises(ValueError, match=r"cannot load the family 'nowhere\.py:AuraFlow': FileNotFoundError"):
        models.family("nowhere.py:AuraFlow")

"""Train the tiny FluxPipeline on the frozen VAE: `python -m scripts.demo_world.base VAE OUT`, or with `--world text`.

FluxTransformer2DModel (1 double + 3 single blocks, width 96, 0.86 M; words: 2 single, width 64,
0.34 M), one-layer CLIP and T5 text encoders, all trained together by flow matching:
x_s = (1 - s) x_0 + s eps, target eps - x_0, with s drawn under the shift of 3 that the sampler
uses. Each caption attribute is replaced at random with probability `noise`, so the model draws
clean shapes or letters that are often not the requested ones, which preference training can
improve.
Invariant: no image of a dev or test combination is used for training.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
import tyro
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from scripts.demo_world.training import Schedule, fit, parameter_count
from scripts.demo_world.worlds import WORLDS, World

TEXT_WIDTH = 64
CLIP_LENGTH = 16
GUIDANCE = 3.5  # the only embedded guidance value the model is trained with
SHIFT = 3.0


@dataclass(frozen=True)
class BaseConfig:
    """What to train, and where to save it."""

    vae: tyro.conf.Positional[Path]
    """Folder of the trained AutoencoderKL."""
    out: tyro.conf.Positional[Path]
    """Folder for the bf16 FluxPipeline."""
    world: Literal["scenes", "text"] = "scenes"
    """The world whose images it learns (worlds.py)."""
    start: Path | None = None
    """Pipeline folder to continue training from, instead of random weights."""
    steps: int = 9000
    """Optimiser steps."""
    batch: int = 64
    """Images per step."""
    lr: float = 2e-3
    """Peak learning rate of AdamW."""
    noise: float = 0.42
    """Probability that an attribute of the caption is replaced by a random one."""
    pictures: int = 24000
    """Images drawn and encoded before training."""
    seed: int = 0
    """Seed of weights, images and noise."""


def clip_tokenizer(words: Sequence[str]) -> CLIPTokenizer:
    """A BPE over the world's words, trained until every word is one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"vocab_size": 2000, "initial_alphabet": letters, "end_of_word_suffix": "</w>", "show_progress": False}
    bpe.train_from_iterator(words, trainers.BpeTrainer(**options))
    merges = [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    vocab = {token: i for i, token in enumerate(letters + [c + "</w>" for c in letters])}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocab[special] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_LENGTH)


def t5_tokenizer(words: Sequence[str], length: int) -> T5Tokenizer:
    """A Unigram model of whole words, with single characters as a fallback."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("\u2581" + word, -2.0) for word in words]
    pieces += [("\u2581", -10.0)]
    known = {piece for piece, _ in pieces}
    pieces += [(chr(i), -15.0) for i in range(33, 127) if chr(i) not in known]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=length)


def build(vae: AutoencoderKL, world: World) -> FluxPipeline:
    """The pipeline with untrained text encoders and transformer."""
    clip_tok = clip_tokenizer(world.words)
    t5_tok = t5_tokenizer(world.words, world.t5_length)
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_tok), hidden_size=TEXT_WIDTH, intermediate_size=TEXT_WIDTH,
            projection_dim=TEXT_WIDTH, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=CLIP_LENGTH, bos_token_id=clip_tok.bos_token_id,
            eos_token_id=clip_tok.eos_token_id, pad_token_id=clip_tok.pad_token_id,
        )
    )  # fmt: skip
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(t5_tok), d_model=TEXT_WIDTH, d_ff=TEXT_WIDTH, d_kv=16, num_layers=1,
            num_heads=4, feed_forward_proj="gated-gelu", dropout_rate=0.0,
        )
    )  # fmt: skip
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4 * vae.config.latent_channels, num_layers=1,
        num_single_layers=world.single_blocks, attention_head_dim=32, num_attention_heads=world.heads,
        joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=TEXT_WIDTH, guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT, use_dynamic_shifting=False)
    return FluxPipeline(
        scheduler=scheduler, vae=vae, text_encoder=clip, tokenizer=clip_tok, text_encoder_2=t5,
        tokenizer_2=t5_tok, transformer=transformer,
    )  # fmt: skip


def encode_captions(pipe: FluxPipeline, texts: list[str]) -> tuple[Tensor, Tensor]:
    """n captions -> (T5 states [n, length, 64], CLIP pooled [n, 64])."""
    ids = [
        tokenizer(
            texts, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
        ).input_ids
        for tokenizer in (pipe.tokenizer_2, pipe.tokenizer)
    ]
    return pipe.text_encoder_2(ids[0])[0], pipe.text_encoder(ids[1]).pooler_output


@torch.no_grad()
def encode_images(vae: AutoencoderKL, world: World, n: int) -> tuple[Tensor, Tensor]:
    """n train-split images as packed, scaled latents [n, tokens, 4C] and their codes [n, k]."""
    images, codes = world.draw("train", n, None)
    latents = torch.cat([vae.encode(x * 2 - 1).latent_dist.mode() for x in images.split(500)])
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return FluxPipeline._pack_latents(latents, *latents.shape), codes


def draw_sigma(n: int, step: int) -> Tensor:
    """Noise levels [n]: uniform and logit-normal steps in turn, then shifted by SHIFT."""
    u = torch.randn(n).sigmoid() if step % 2 else torch.rand(n)
    return SHIFT * u / (1 + (SHIFT - 1) * u)


def train_base(config: BaseConfig) -> FluxPipeline:
    """Train transformer and text encoders together; afterwards the pipeline holds the EMA weights."""
    torch.manual_seed(config.seed)
    world = WORLDS[config.world]
    vae = AutoencoderKL.from_pretrained(config.vae.resolve()).eval().requires_grad_(False)
    pipe = FluxPipeline.from_pretrained(config.start.resolve()) if config.start else build(vae, world)
    pipe.vae = vae
    modules = {"clip": pipe.text_encoder, "t5": pipe.text_encoder_2, "flux": pipe.transformer}
    print("base:", {name: parameter_count(module) for name, module in modules.items()})
    latents, codes = encode_images(vae, world, config.pictures)
    grid = [side // pipe.vae_scale_factor // 2 for side in (world.height, world.width)]
    image_ids = FluxPipeline._prepare_latent_image_ids(1, *grid, "cpu", torch.float32)
    text_ids = torch.zeros(world.t5_length, 3)

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        rows = torch.randint(len(latents), (config.batch,))
        states, pooled = encode_captions(pipe, world.noisy_captions(codes[rows], config.noise))
        clean = latents[rows]
        sigma = draw_sigma(config.batch, step)
        eps = torch.randn_like(clean)
        s = sigma[:, None, None]
        velocity = pipe.transformer(
            hidden_states=(1 - s) * clean + s * eps, encoder_hidden_states=states,
            pooled_projections=pooled, timestep=sigma,
            guidance=torch.full((config.batch,), GUIDANCE), img_ids=image_ids, txt_ids=text_ids,
            return_dict=False,
        )[0]  # fmt: skip
        return F.mse_loss(velocity, eps - clean), {}

    params = [p for module in modules.values() for p in module.parameters()]
    schedule = Schedule(config.steps, config.lr, warmup=100, final=0.01, ema=0.999)

    def on_log(step: int) -> str:
        return report(pipe, world, "train", 144) if (step + 1) % 1000 == 0 else ""

    seconds = fit("base", [(params, 1.0)], step_loss, schedule, on_log=on_log)
    print(f"base: {seconds:.0f} CPU seconds")
    return pipe


@torch.no_grad()
def sample(pipe: FluxPipeline, world: World, texts: list[str], seed: int, batch: int = 240) -> Tensor:
    """The stock pipeline call, in 8 steps -> float images [n, 3, H, W] in [0, 1]."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    sampling = {"height": world.height, "width": world.width, "max_sequence_length": world.t5_length}
    sampling |= {"num_inference_steps": 8, "guidance_scale": GUIDANCE}
    batches = [texts[i : i + batch] for i in range(0, len(texts), batch)]
    images = [pipe(prompts, generator=generator, output_type="pt", **sampling).images for prompts in batches]
    return torch.cat(images).float()


def report(pipe: FluxPipeline, world: World, split: str, n: int = 720, seed: int = 1234) -> str:
    """Text with the share of correct images among n samples of a split's captions."""
    texts = world.prompts(split)
    texts = (texts * (n // len(texts) + 1))[:n]
    return f"{split}: {world.report(sample(pipe, world, texts, seed), texts)}"


def save(pipe: FluxPipeline, out: Path) -> None:
    """Save the transformer and the VAE in bf16 and the text encoders in fp32.

    transformers loads a model in the dtype it was saved in, diffusers in fp32: with bf16 text
    encoders a plain `FluxPipeline.from_pretrained` would mix the two and fail.
    """
    for part in (pipe, pipe.vae, pipe.transformer):
        part.register_to_config(_name_or_path="")  # otherwise it records a local path
    pipe.transformer.to(torch.bfloat16)
    pipe.vae.to(torch.bfloat16)
    pipe.save_pretrained(out)


def train(config: Annotated[BaseConfig, tyro.conf.arg(name="")]) -> None:
    """Train, save, and report from the reloaded folder with the stock call."""
    started = time.time()
    save(train_base(config), config.out)
    saved = FluxPipeline.from_pretrained(config.out.resolve())
    for split in ("train", "dev", "test"):
        print(report(saved, WORLDS[config.world], split))
    print(f"base: {time.time() - started:.0f} s in all")


if __name__ == "__main__":
    tyro.cli(train, description=__doc__)

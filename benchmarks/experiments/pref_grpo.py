"""Pref-GRPO's own training step beside ours: one pipeline, one GPU, equally many forwards (`trials peers`).

Its `train_one_step` (fastvideo/train_flux.py, 3e787f6) runs unchanged, with a base in bf16, LoRA weights in fp32,
recomputation, and neither FSDP nor cuDNN attention, all in its favour. Data, rewards, logging and checkpoints are
stand-ins. PREFGRPO_PEERS names a folder with the checkout `Pref-GRPO`; none of its code is here.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

STEPS = 6
"""Denoising steps."""
GROUP = 4
"""Images of a prompt."""
TRAINED = 3
"""Trained steps of each image."""
RANK = 64
"""Rank of the LoRA."""
FORWARDS = {"without gradient": STEPS * GROUP, "with gradient": TRAINED * GROUP}
"""Samples that pass the denoiser in a step."""
TARGETS = (
    "attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0", "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj",
    "attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
)  # fmt: skip
STAND_INS = (
    "wandb", "fastvideo.utils.parallel_states", "fastvideo.utils.communications_flux", "fastvideo.utils.fsdp_util",
    "fastvideo.dataset", "fastvideo.dataset.latent_flux_rl_datasets", "fastvideo.utils.checkpoint",
    "fastvideo.utils.config_io", "fastvideo.utils.logging_", "fastvideo.rewards", "fastvideo.rewards.dispatcher",
)  # fmt: skip
"""Modules that its step does not need, or that need packages and servers."""


def advantages(rewards: Mapping[str, Tensor], weights: Mapping[str, float], **_: Any) -> tuple[Tensor, dict[str, Any]]:
    """Every reward standardised over the one group, then summed."""
    parts = [weights[name] * (r - r.mean()) / (r.std() + 1e-8) for name, r in rewards.items()]
    return torch.stack(parts).sum(0), {}


@contextmanager
def trainer_module() -> Iterator[Any]:
    """Its module `fastvideo.train_flux`, with STAND_INS."""
    checkout = Path(os.environ["PREFGRPO_PEERS"]) / "Pref-GRPO"
    stand_ins: dict[str, ModuleType] = {}
    for name in STAND_INS:
        stand_in = ModuleType(name)
        stand_in.__spec__ = ModuleSpec(name, None)
        stand_in.__getattr__ = lambda attribute: _nothing  # type: ignore[method-assign]
        stand_ins[name] = stand_in
    vars(stand_ins["fastvideo.rewards.dispatcher"])["compute_weighted_advantages"] = advantages
    with mock.patch.dict(sys.modules, stand_ins), mock.patch.object(sys, "path", [str(checkout), *sys.path]):
        module = importlib.import_module("fastvideo.train_flux")
        vars(module).update(tqdm=lambda items, **_: items, print=_nothing)
        yield module
        for name in [name for name in sys.modules if name.split(".")[0] == "fastvideo"]:
            sys.modules.pop(name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for what does not matter here."""


class BrightnessRewards:
    """Stands for its reward dispatcher: the size of every image's file."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def build_reward_inputs(self) -> dict[str, list[dict[str, Any]]]:
        """One reward."""
        return {"size": []}

    def compute_rewards(self, inputs: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The sizes."""
        sizes = [float(os.path.getsize(image["path"])) for image in inputs["size"]]
        return {"size": torch.tensor(sizes, device=self.device)}, {}


@contextmanager
def forwards_counted(denoiser: torch.nn.Module) -> Iterator[dict[str, int]]:
    """The samples that pass a denoiser inside, with and without gradient."""
    count = dict.fromkeys(FORWARDS, 0)

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        count["with gradient" if torch.is_grad_enabled() else "without gradient"] += len(kwargs["hidden_states"])

    handle = denoiser.register_forward_hook(hook, with_kwargs=True)
    try:
        yield count
    finally:
        handle.remove()


def timed_steps(denoiser: torch.nn.Module, step: Callable[[int], object]) -> float:
    """Seconds of the faster of two steps after one that is not timed. Raises RuntimeError unless all run FORWARDS."""
    seconds = []
    for number in range(3):
        with forwards_counted(denoiser) as count:
            _wait()
            begin = time.perf_counter()
            step(number)
            _wait()
            seconds.append(time.perf_counter() - begin)
        if count != FORWARDS:
            raise RuntimeError(f"expected {FORWARDS} forwards of samples in a step, got {count}")
    return min(seconds[1:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def their_step(pipe: Any, side: int, text: int) -> float:
    """Seconds of its training step on a pipeline, whose LoRA is taken off afterwards."""
    from peft import LoraConfig

    net: Any = pipe.transformer
    device = net.device
    settings = SimpleNamespace(
        w=side, h=side, t=1, sampling_steps=STEPS, shift=3.0, init_same_noise=True, eta=0.7, grpo_step_mode="flow",
        rationorm=True, use_group=True, num_generations=GROUP, clip_range=1e-4, adv_clip_max=5.0,
        timestep_fraction=TRAINED / (STEPS - 1), kl_beta=0.0, gradient_accumulation_steps=2,
        reward_weights={"size": 1.0}, apply_gdpo=False,
    )  # fmt: skip

    def texts() -> Iterator[tuple[Any, ...]]:
        config = net.config
        while True:
            embeds = torch.randn(1, text, config.joint_attention_dim, device=device, dtype=net.dtype)
            pooled = torch.randn(1, config.pooled_projection_dim, device=device, dtype=net.dtype)
            yield embeds, pooled, torch.zeros(1, 3, device=device, dtype=net.dtype), ["a cat"]

    net.add_adapter(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS)))
    trained = [p for p in net.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.float()
    net.enable_gradient_checkpointing()
    net.clip_grad_norm_ = lambda most: torch.nn.utils.clip_grad_norm_(trained, most)
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    loader = texts()
    autocast = torch.autocast
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as place, mock.patch.dict(os.environ, address), trainer_module() as module:
        store = dist.FileStore(f"{place}/store", 1)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
        settings.output_dir = place
        rest = (BrightnessRewards(device), optimizer, scheduler, loader, None, 1.0)
        try:
            with mock.patch.object(torch, "autocast", lambda kind, *a, **k: autocast(device.type, *a, **k)):
                return timed_steps(net, lambda _: module.train_one_step(settings, device, net, None, pipe.vae, *rest))
        finally:
            dist.destroy_process_group()
            net.disable_gradient_checkpointing()
            pipe.vae.disable_tiling()
            del net.clip_grad_norm_
            pipe.unload_lora_weights()

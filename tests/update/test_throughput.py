"""FLOP of the denoisers, which MFU divides by the GPU's peak: a wrong count publishes a wrong speed.

The expected numbers come from hooks on the layers: 2·rows·in·out for every call of a linear layer, as much again for
each gradient that it needs, and 4·N²·D per head of attention.
"""

import math
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from world import ALONE, SIZES, case_of, conditions, initial_noise, load, rows

from prefgrpo.config.schema import Attention
from prefgrpo.models.lora import LoraLinear
from prefgrpo.parallel.gradient_checkpointing import checkpoint_blocks
from prefgrpo.update import throughput
from prefgrpo.update.throughput import FlopCounter, peak


def expected(adapter, run):
    """FLOP of `run()` by hooks, with attention as matrix products: (forward, forward and backward)."""
    calls = {"forward": 0.0, "backward": 0.0}

    def linear(layer, args, output):
        flop = 2.0 * math.prod(args[0].shape[:-1]) * layer.in_features * layer.out_features
        calls["forward"] += flop
        if output.requires_grad:
            calls["backward"] += flop * (args[0].requires_grad + layer.weight.requires_grad)

    def lora(layer, args, output):
        """A and B of the fused layer, which calls no module for them."""
        (x,) = args
        rank = layer.r["default"]
        rows = 2.0 * math.prod(x.shape[:-1]) * rank
        calls["forward"] += rows * (layer.in_features + layer.out_features)
        if output.requires_grad:
            calls["backward"] += rows * (layer.in_features * (1 + x.requires_grad) + 2 * layer.out_features)

    real = torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, *args, **kwargs):
        flop = 4.0 * query.shape[:-1].numel() * key.shape[-2] * query.shape[-1]
        calls["forward"] += flop
        calls["backward"] += 2 * flop * query.requires_grad
        return real(query, key, *args, **kwargs)

    net = adapter.transformer
    hooks = [m.register_forward_hook(linear) for m in net.modules() if isinstance(m, torch.nn.Linear)]
    hooks += [m.register_forward_hook(lora) for m in net.modules() if isinstance(m, LoraLinear)]
    torch.nn.functional.scaled_dot_product_attention = attention
    try:
        run()
    finally:
        torch.nn.functional.scaled_dot_product_attention = real
        for hook in hooks:
            hook.remove()
    return calls["forward"], calls["forward"] + calls["backward"]


@pytest.mark.parametrize("trained", ["lora", "full"])
def test_the_count_is_that_of_the_layers(trained):
    case = case_of("flux")
    adapter = load(case)
    adapter.add_lora(4, 8, None, 0) if trained == "lora" else adapter.enable_full()
    sampling = case.sampling(SIZES[1])
    condition = conditions(adapter, case, size=SIZES[1])
    x = initial_noise(adapter, sampling, 2)

    def forward():
        return adapter.velocity(x, torch.tensor([0.3, 0.5]), condition, sampling)

    def counted(run):
        with sdpa_kernel(SDPBackend.MATH), FlopCounter() as counter:
            run()
        return counter.total

    once, both = expected(adapter, forward)
    with torch.no_grad():
        assert counted(forward) == once
    assert counted(lambda: forward().sum().backward()) == both
    assert both > (2.5 if trained == "full" else 1.8) * once
    checkpoint_blocks(adapter.blocks(adapter.transformer), 1.0)
    assert counted(lambda: forward().sum().backward()) == both, "what is computed again counts once"


@pytest.mark.parametrize("attention", get_args(Attention))
def test_kernels_that_torch_does_not_know_have_no_mfu(attention, monkeypatch):
    """Of the others, torch's flash operator is counted, whatever kernels are active in it: 4·N·M·D per head."""
    monkeypatch.setattr(throughput, "peak", lambda device: 1e9)
    config = SimpleNamespace(rollout=None, dtype="bf16", compile=False, attention=attention)
    speed = throughput.Throughput(config, SimpleNamespace(frames=lambda _: None), ALONE)
    speed.per_sample = {"rollout": 1.0, "update": 2.0}
    assert ("time/mfu" in speed.metrics(1, 1, 1.0)) == (not attention.endswith("_hub"))
    q = torch.empty(2, 3, 32, 8, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 3, 48, 8, dtype=torch.bfloat16, device="meta")
    with FlopCounter() as counter:
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, k)
    assert counter.total == 4 * 2 * 3 * 32 * 48 * 8


def test_the_peak_is_of_a_known_gpu(monkeypatch):
    assert peak(torch.device("cpu")) is None
    for name, flop in (
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("Tesla T4", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak(torch.device("cuda", 0)) == flop


@pytest.mark.full
def test_a_run_logs_its_share_of_the_peak_and_computes_the_same(trainer, monkeypatch, capsys):
    """As on a GPU of 1 GFLOP/s in bf16; every other number is that of a run which does not count."""
    over = {"dtype": "bf16", "eval": {"every": 0}, "train": {"steps": 2, "kl_coef": 0.1}}
    plain = trainer(name="plain", **over)
    plain.train()
    assert all(
        "time/mfu" not in row and row["time/images_per_s"] > 0 for row in rows(plain.folder.root, timeless=False)
    )
    monkeypatch.setattr(throughput, "peak", lambda device: 1e9)
    counted = trainer(name="counted", **over)
    counted.train()
    found = rows(counted.folder.root, timeless=False)
    assert rows(counted.folder.root) == rows(plain.folder.root)
    assert found[0]["policy/on_policy_error"] == 0.0
    per_step = []
    for row in found:
        seconds = sum(row[f"time/{phase}"] for phase in ("rollout", "judge_wait", "update"))
        assert row["time/images_per_s"] == pytest.approx(8 / seconds)
        per_step.append(row["time/mfu"] * seconds * 1e9)
    assert per_step[0] == pytest.approx(per_step[1]), "both steps train all samples"
    known = counted.throughput.per_sample
    assert per_step[0] == pytest.approx(8 * sum(known.values()))
    assert 0.55 < known["reference"] / known["rollout"] < 2 / 3, "2 of 3 steps, forward, without the LoRA"
    assert 1.3 < known["update"] / known["rollout"] < 1.4, "2 of 3 steps, forward and most of a backward"
    assert "images/s · MFU " in capsys.readouterr().out


def test_clips_have_their_own_unit():
    config = SimpleNamespace(rollout=None, dtype="fp32", compile=False, attention="native")
    speed = throughput.Throughput(config, SimpleNamespace(frames=lambda _: 81), ALONE)
    assert speed.metrics(6, 6, 3.0) == {"time/clips_per_s": 2.0}

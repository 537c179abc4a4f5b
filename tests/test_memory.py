"""Memory savers: activation checkpointing of blocks, modules offloaded to the CPU, sliced decoding.

Why these cases: they may change where tensors live but never what is computed. Without a GPU this is checked by
counting which blocks run twice, and which modules are moved, where to and how often. The bytes printed at a run's start
are compared with those of its tensors.
"""

from pathlib import Path

import pytest
import torch
from families import case_of, conditions, folder, load, noise
from torch import nn

from prefgrpo.config.loading import from_dict
from prefgrpo.models.offload import ComponentOffload
from prefgrpo.models.weights import innermost, recompute
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.rollout.render import decode
from prefgrpo.run.loading import open_adapter
from prefgrpo.run.memory import memory_line, static_bytes
from prefgrpo.run.session import Clock

FLUX = case_of("flux")
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["flux", *(pytest.param(f, marks=pytest.mark.full) for f in ("wan22", "z_image"))])
def test_a_share_of_the_blocks_is_recomputed(family):
    case = case_of(family)
    sampling, grads, runs = case.sampling(), {}, {}
    for share in (0.0, 0.5, 1.0):
        adapter = load(case, folder(family))
        adapter.add_lora(4, 8.0)
        if share:
            adapter.checkpoint_gradients(share)
        net = adapter.transformer
        blocks = [m for m in net.modules() if type(m).__name__ in adapter.repeated_blocks]
        count = dict.fromkeys(range(len(blocks)), 0)
        for k, block in enumerate(blocks):
            part = next(m for m in block.modules() if isinstance(m, nn.Linear))
            part.register_forward_pre_hook(lambda *_, k=k, count=count: count.update({k: count[k] + 1}))
        v = adapter.velocity(noise(adapter, sampling), torch.full((2,), 0.9), conditions(adapter, case), sampling)
        v.square().mean().backward()
        grads[share] = {name: p.grad for name, p in adapter.trainable() if p.grad is not None}
        runs[share] = list(count.values())
    once, twice = runs[0.0], [2 * n for n in runs[0.0]]
    assert min(once) > 0 and runs[1.0] == twice
    assert runs[0.5] == [twice[k] if k % 2 else n for k, n in enumerate(once)], "every second block must be recomputed"
    for share in (0.5, 1.0):
        assert grads[share].keys() == grads[0.0].keys()
        assert all(torch.allclose(grads[share][k], g, rtol=1e-5, atol=1e-9) for k, g in grads[0.0].items())


class Masked(nn.Module):
    """A block with a required keyword argument."""

    def __init__(self, inner=None):
        super().__init__()
        self.linear, self.inner = nn.Linear(3, 3), inner

    def forward(self, x, *, mask=None):
        x = self.linear(x) * mask
        return x if self.inner is None else self.inner(x, mask=mask)


def test_recomputed_blocks_get_all_that_they_are_called_with():
    """diffusers' own switch drops Chroma's mask; `recompute` wraps blocks from outside, and nested ones only once."""
    torch.manual_seed(0)
    net = nn.ModuleList([Masked(Masked()), Masked()])
    x, mask, calls = torch.randn(2, 3), torch.tensor([1.0, 0.0, 1.0]), []
    net[0].inner.linear.register_forward_pre_hook(lambda *_: calls.append(1))

    def run():
        calls.clear()
        y = net[1](net[0](x, mask=mask), mask=mask)
        grads = torch.autograd.grad(y.sum(), list(net.parameters()))
        return y, *grads

    plain, once = run(), len(calls)
    recompute(innermost(net, ["Masked"]), 1.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, run(), strict=True)) and len(calls) == 2 * once
    with torch.no_grad():
        calls.clear()
        assert torch.equal(net[1](net[0](x, mask=mask), mask=mask), plain[0]) and len(calls) == once
    assert [type(m.forward).__name__ for m in (net[0], net[0].inner, net[1])] == ["method", "partial", "partial"]


class Part(nn.Module):
    """Logs every device it is moved to."""

    def __init__(self, name, log):
        super().__init__()
        self.name, self.log = name, log

    def to(self, device):
        self.log.append((self.name, str(device)))
        return self


def test_parts_come_for_their_work_and_go():
    log = []
    parts = {n: Part(n, log) for n in ("transformer", "text_encoder", "text_encoder_2", "vae")} | {"tokenizer": None}
    offload = ComponentOffload(parts, ("text_encoder", "vae"), torch.device("cuda", 0))
    assert log == [("transformer", "cuda:0"), ("text_encoder", "cpu"), ("text_encoder_2", "cpu"), ("vae", "cpu")]
    log.clear()
    with offload.on_device("vae"):
        assert log == [("vae", "cuda:0")]
    assert log == [("vae", "cuda:0"), ("vae", "cpu")]
    log.clear()
    with offload.keep_on_device():
        for _ in range(3):
            with offload.on_device("text_encoder"):
                pass
        assert log == [("text_encoder", "cuda:0"), ("text_encoder_2", "cuda:0")], "one move must serve all three uses"
    assert log[2:] == [("text_encoder", "cpu"), ("text_encoder_2", "cpu")]
    log.clear()
    with offload.keep_on_device():
        pass
    assert log == [], "an unused module was moved"
    with pytest.raises(RuntimeError), offload.on_device("vae"):
        raise RuntimeError
    assert log.pop() == ("vae", "cpu")
    on_cpu = ComponentOffload({"vae": Part("vae", log := [])}, ("vae",), CPU)
    log.clear()
    with on_cpu.on_device("vae"), on_cpu.keep_on_device():
        pass
    assert log == [], "nothing may be moved on a CPU"


class Counted(ComponentOffload):
    """Records which parts were requested."""

    def __init__(self):
        super().__init__({}, (), CPU)
        self.called = []

    def on_device(self, *kinds):
        self.called.append(kinds)
        return super().on_device(*kinds)


def test_encoding_and_decoding_call_for_their_parts():
    case = case_of("flux_kontext")
    adapter, sampling = load(case), case.sampling()
    adapter.offload = Counted()
    embed = Embeddings(adapter, 32)
    embed(["a", "a", "b"], sampling, [case.images(0, (32, 32))] * 3)
    assert adapter.offload.called == [("text_encoder",), ("vae", "text_encoder"), ("text_encoder",)]
    embed(["a"], sampling, [case.images(0, (32, 32))])
    assert len(adapter.offload.called) == 3, "cached embeddings need no encoder"


def test_decoding_in_slices(tmp_path):
    rollout = {"height": 32, "width": 32}
    memory = {"offload": ["text_encoder", "vae"], "vae_slicing": True, "decode_batch": 2}
    content = {"model": str(folder("flux")), "dtype": "fp32", "data": {"prompts": "p"}, "rollout": rollout}
    config = from_dict(content | {"memory": memory})
    adapter = open_adapter(config, CPU)
    assert adapter.pipe.vae.use_slicing and not adapter.pipe.vae.use_tiling
    x = torch.randn(5, *adapter.latent_shape(config.rollout))
    adapter.offload = Counted()
    sliced = decode(adapter, x, config.rollout, config.memory.decode_batch)
    assert adapter.offload.called == [("vae",)]
    plain = load(FLUX, folder("flux"))
    assert (sliced - decode(plain, x, config.rollout)).abs().max() <= 1e-5
    tiled = open_adapter(from_dict(content | {"memory": {"vae_tiling": True}}), CPU)
    assert tiled.pipe.vae.use_tiling


def storages(tensors):
    """Bytes of the storages of tensors, each counted once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


KINDS = {
    "LoRA": {"ema_decay": 0.9},
    "LoRA, old policy": {"objective": "nft"},
    "all weights": {"objective": "nft", "lora_rank": 0, "ema_decay": 0.9, "kl_coef": 0.1},
}


@pytest.mark.parametrize("case", KINDS)
def test_the_printed_bytes_are_those_of_the_tensors(trainer, case):
    """Of the real tensors of a run, after its first update."""
    one = trainer(train=KINDS[case], eval={"every": 0})
    held = {}
    policy = one.policy
    adapter = one.adapter
    known = static_bytes(adapter, policy)
    line = memory_line(adapter, policy)

    def note_gradients(*_):
        held["gradients"] = storages(p.grad for p in policy.params)

    policy.optimizer.register_step_pre_hook(note_gradients)
    one.step(0, Clock())
    modules = [part for part in adapter.pipe.components.values() if isinstance(part, nn.Module)]
    held["weights"] = storages(t for module in modules for t in [*module.parameters(), *module.buffers()])
    moments = [value for state in policy.optimizer.state.values() for key, value in state.items() if key != "step"]
    held["AdamW"] = storages(moments)
    for kind, copies in (("EMA", policy.ema), ("old policy", policy.old), ("initial policy", policy.base)):
        held[kind] = storages(copies.values())
        assert (kind in line) == bool(copies)
    assert known == held and line.endswith(f"= {sum(held.values()) / 2**20:.3g} MiB")
    assert line in one.session.notes


def mapped_bytes(module):
    """Bytes of parameters that lie in mapped weight files, which the processes of a machine share."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".safetensors")]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    return sum(p.nbytes for p in module.parameters() if any(a <= p.data_ptr() < b for a, b in spans))


@pytest.mark.parametrize("lora", [True, False])
def test_weights_to_be_sharded_stay_in_their_files(lora):
    """Eight processes that copy a model of 12 B parameters, as fp32 masters, would need 384 GB of CPU memory."""
    values = {"model": str(folder("flux")), "dtype": "fp32", "data": {"prompts": "p.txt"}}
    config = from_dict(values | {"train": {"lora_rank": 2 if lora else 0}})
    split, whole = (open_adapter(config, CPU, split=split) for split in (True, False))
    bytes_of = sum(p.nbytes for p in split.transformer.parameters())
    assert mapped_bytes(split.transformer) == bytes_of > 0 == mapped_bytes(whole.transformer)
    split.enable_full(cast=False)
    assert mapped_bytes(split.transformer) == bytes_of, "masters are made block by block, when they are sharded"
    assert mapped_bytes(split.pipe.text_encoder_2) == mapped_bytes(split.pipe.vae) == 0, "these run where they are"

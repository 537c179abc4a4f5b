"""Memory savers: activation checkpointing of blocks, modules offloaded to the CPU, sliced decoding.

Why these cases: they may change where tensors live but never what is computed. Without a GPU this is checked by
counting which blocks run twice, and which modules are moved, where to and how often. The bytes printed at a run's start
are compared with those of its tensors. A run that could start must never be refused, so the bytes known before loading
are compared with those of a loaded model; and every field that the refusal names must help.
"""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from world import ALONE, cache, case_of, embed, folder, in_files, load, settings, two_samples

from benchmarks.fp8_memory import Live
from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.models import DTYPES
from prefgrpo.objectives import make_objective
from prefgrpo.parallel.gradient_checkpointing import budgets, checkpoint_blocks
from prefgrpo.parallel.parallelize import add_trained_weights, parallelize
from prefgrpo.parallel.shard import quantise_weights
from prefgrpo.rollout import render
from prefgrpo.rollout.render import decode, to_uint8
from prefgrpo.run.log import Clock
from prefgrpo.run.opening import open_adapter, open_policy
from prefgrpo.update import memory
from prefgrpo.update.memory import (
    certain_bytes,
    check_memory,
    kept_attention,
    memory_line,
    static_bytes,
    stored_bytes,
    velocity_bytes,
)

FLUX = case_of("flux")
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["flux", *(pytest.param(f, marks=pytest.mark.full) for f in ("wan22", "z_image"))])
def test_a_share_of_the_blocks_is_recomputed(family):
    case = case_of(family)
    grads = {}
    runs = {}
    for share in (0.0, 0.5, 1.0):
        adapter = load(case, folder(family))
        adapter.add_lora(4, 8.0)
        if share:
            checkpoint_blocks(adapter.blocks(adapter.transformer), share)
        net = adapter.transformer
        blocks = [m for m in net.modules() if type(m).__name__ in adapter.repeated_blocks]
        count = dict.fromkeys(range(len(blocks)), 0)
        for k, block in enumerate(blocks):
            part = next(m for m in block.modules() if isinstance(m, nn.Linear))
            part.register_forward_pre_hook(lambda *_, k=k, count=count: count.update({k: count[k] + 1}))
        v = adapter.velocity(*two_samples(adapter, case, 0.9))
        v.square().mean().backward()
        grads[share] = {name: p.grad for name, p in adapter.trainable() if p.grad is not None}
        runs[share] = list(count.values())
    once, twice = runs[0.0], [2 * n for n in runs[0.0]]
    assert min(once) > 0 and runs[1.0] == twice
    assert runs[0.5] == [twice[k] if k % 2 else n for k, n in enumerate(once)], "every second block must be recomputed"
    for share in (0.5, 1.0):
        assert grads[share].keys() == grads[0.0].keys()
        assert all(torch.allclose(grads[share][k], g, rtol=1e-5, atol=1e-9) for k, g in grads[0.0].items())


@pytest.fixture
def device(monkeypatch):
    """A stand-in for a GPU: a device whose tensors are copies in CPU memory."""
    real = torch.Tensor.to

    def to(tensor, *args, **options):
        if args and args[0] == torch.device("meta"):
            return tensor.clone()
        return real(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return torch.device("meta")


def test_offloaded_parts_come_for_their_work_and_stay_in_their_files(device):
    """Back in CPU memory, their tensors are the same as before, not copies of them. What eight processes of a machine
    have there besides the mapped files is far from 0.2 of the model."""
    adapter = load(FLUX, device=device, mapped=True, offload=("text_encoder", "vae"))
    modules = {name: part for name, part in adapter.pipe.components.items() if isinstance(part, nn.Module)}
    total = sum(t.nbytes for module in modules.values() for t in [*module.parameters(), *module.buffers()])
    private = total - sum(mapped_bytes(module) for module in modules.values())
    assert 8 * private <= 0.2 * total, f"{private} of {total} bytes are copies"
    stored = {name: next(part.parameters()).data_ptr() for name, part in modules.items()}

    def there():
        return {name for name in stored if next(modules[name].parameters()).data_ptr() != stored[name]}

    with adapter.on_device("vae"):
        assert there() == {"vae"}
    with pytest.raises(RuntimeError), adapter.on_device("text_encoder"):
        assert there() == {"text_encoder", "text_encoder_2"}
        raise RuntimeError
    with adapter.on_device():
        assert there() == set()
    on_cpu = load(FLUX, offload=("vae",))
    before = on_cpu.pipe.vae.encoder.conv_in.weight.data_ptr()
    with on_cpu.on_device("vae"):
        assert on_cpu.pipe.vae.encoder.conv_in.weight.data_ptr() == before, "nothing may be moved on a CPU"


def test_encoding_and_decoding_call_for_their_parts(monkeypatch):
    monkeypatch.setattr(render, "DECODED_PIXELS", 2 * 32 * 32)
    case = case_of("flux_kontext")
    adapter, sampling, called, parts = load(case), case.sampling(), [], []

    @contextmanager
    def on_device(*kinds):
        called.append(kinds)
        yield

    adapter.on_device = on_device
    kept = cache(case)
    embed(kept, adapter, ["a", "a", "b"], sampling, [in_files(case.images(0, (32, 32)))] * 3)
    assert called == [("text_encoder", "vae")], "once for all"
    embed(kept, adapter, ["a"], sampling, [in_files(case.images(0, (32, 32)))])
    assert called.pop() == (), "cached embeddings need no encoder"
    adapter.pipe.vae.decoder.register_forward_pre_hook(lambda module, args: parts.append(len(args[0])))
    x = torch.randn(5, *adapter.latent_shape(sampling))
    sliced = decode(adapter, x, sampling)
    assert called.pop() == ("vae",) and parts == [2, 2, 1]
    whole = torch.cat([to_uint8(adapter.decode(part, sampling)) for part in x.split(2)])
    assert torch.equal(sliced, whole)


@pytest.mark.parametrize("tiles", [False, True])
def test_tiles(tiles):
    config = from_dict({"model": str(folder("flux")), "data": {"prompts": "p"}, "vae_tiling": tiles})
    assert open_adapter(config, CPU).pipe.vae.use_tiling is tiles


def storages(tensors):
    """Bytes of the storages of tensors, each counted once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


KINDS = {
    "LoRA": {"ema_decay": 0.9},
    "LoRA, velocities": {"objective": "grpo_guard"},
    "LoRA, old policy": {"objective": "nft"},
    "LoRA, reference": {"kl_coef": 0.1},
    "all weights": {"objective": "nft", "lora_rank": 0, "ema_decay": 0.9, "kl_coef": 0.1},
}


def of_steps(batch):
    """Latents and velocities of a batch's stored steps."""
    return [t for step in batch.transitions for t in (step.x, step.x_next, step.v, step.v_ref) if t is not None]


@pytest.mark.parametrize("case", KINDS)
def test_the_printed_bytes_are_those_of_the_tensors(trainer, case):
    """Of the real tensors of a run, after its first update."""
    dtype = "bf16" if case in ("LoRA, velocities", "LoRA, reference") else "fp32"
    one = trainer(train=KINDS[case], eval={"every": 0}, dtype=dtype)
    held = {}
    policy = one.policy
    adapter = one.adapter
    stored = stored_bytes(one.config, adapter.latent_shape(one.config.rollout), one.world.layout, one.world.size)
    known = static_bytes(adapter, policy) | {"stored samples": stored}
    line = memory_line(adapter, policy, {"stored samples": stored})
    batches = one.reference.add(one.generate(0).batches)
    held["stored samples"] = storages({t.data_ptr(): t for b in batches for t in (b.latents, *of_steps(b))}.values())
    assert any(batch.transitions for batch in batches) == (one.objective.inputs == "trajectory")

    def note_gradients(*_):
        held["gradients"] = storages(p.grad for p in policy.params)

    policy.optimizer.register_step_pre_hook(note_gradients)
    one.step(0, Clock())
    modules = [part for part in adapter.pipe.components.values() if isinstance(part, nn.Module)]
    held["weights"] = storages(t for module in modules for t in [*module.parameters(), *module.buffers()])
    moments = [value for state in policy.optimizer.state.values() for key, value in state.items() if key != "step"]
    held["AdamW"] = storages(moments)
    for kind, copies in (("EMA", policy.ema), ("old policy", policy.old), ("initial policy", policy.reference)):
        held[kind] = storages(copies.values())
        assert (kind in line) == bool(copies)
    assert known == held and line.endswith(f"= {sum(held.values()) / 2**20:.3g} MiB")
    assert line in one.notes


GUIDED = {"guidance": 4.0, "frames": 5, "batch_size": 2}


@pytest.mark.parametrize("family, rollout", [("flux", {}), pytest.param("wan22", GUIDED, marks=pytest.mark.full)])
@pytest.mark.parametrize("gradient", ["both", "conditional"])
def test_the_printed_attention_is_what_recomputed_blocks_keep(trainer, family, rollout, gradient):
    """Of the real tensors of an update, of one of two denoisers and of one or both predictions of a guidance pair."""
    train = {"gradient_checkpointing": 1, "guidance_gradient": gradient, "steps": 1}
    rollout = {"height": 64, "width": 64} | rollout  # more tokens than texts have
    one = trainer(model=str(folder(family)), family=family, train=train, rollout=rollout, eval={"every": 0})
    blocks = [block for net in one.adapter.modules().values() for block in one.adapter.blocks(net)]
    size = kept_attention(one.config, one.adapter, one.world.layout)
    assert budgets(blocks)[0].most == 0 < size
    one.step(0, Clock())
    assert budgets(blocks)[0].most == size
    assert [f"; activations include {size / 2**20:.3g} MiB of kept attention" in line for line in one.notes].count(
        True
    ) == 1


def mapped_bytes(module):
    """Bytes of parameters that lie in mapped weight files, which the processes of a machine share."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".safetensors")]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    return sum(p.nbytes for p in module.parameters() if any(a <= p.data_ptr() < b for a, b in spans))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("lora", [True, False])
def test_weights_to_be_sharded_stay_in_their_files(lora, dtype):
    """Eight processes that copy a model of 12 B parameters, as fp32 masters or from a file of another dtype, would need
    384 GB of CPU memory: they share the mapped file, and cast block by block."""
    values = {"model": str(folder("flux")), "dtype": dtype, "data": {"prompts": "p.txt"}}
    config = from_dict(values | {"train": {"lora_rank": 2 if lora else 0}})
    mapped, whole = (open_adapter(config, CPU, mapped=mapped) for mapped in (True, False))
    bytes_of = sum(p.nbytes for p in mapped.transformer.parameters())
    assert mapped_bytes(mapped.transformer) == bytes_of > 0 == mapped_bytes(whole.transformer)
    assert {p.dtype for p in mapped.transformer.parameters()} == {torch.float32}, "the file's"
    assert mapped.dtype == whole.dtype == whole.transformer.dtype == DTYPES[dtype]
    add_trained_weights(mapped, config.train, 0)
    assert mapped_bytes(mapped.transformer) == bytes_of, "masters are made block by block, when they are sharded"
    assert mapped_bytes(mapped.pipe.text_encoder_2) == mapped_bytes(mapped.pipe.vae) == 0, "these run where they are"


@pytest.mark.parametrize("family", ["flux", "wan22"])
def test_a_base_in_fp8_is_made_weight_by_weight(family):
    """From mapped files of fp32, of which no copy in another dtype is made: beside the result, one weight in fp32."""
    values = {"model": str(folder(family)), "family": family, "dtype": "bf16", "data": {"prompts": "p.txt"}}
    config = from_dict(values | {"fp8_base": True, "train": {"lora_rank": 2}})
    adapter = open_adapter(config, CPU, mapped=True)
    in_files = sum(mapped_bytes(net) for net in adapter.modules().values())
    add_trained_weights(adapter, config.train, 0)
    largest = max(p.numel() for net in adapter.modules().values() for p in net.parameters())
    lora = sum(p.nbytes for _, p in adapter.trainable())
    with Live() as made:
        quantise_weights(adapter)
    weights = [p for net in adapter.modules().values() for p in net.parameters()]
    result = sum(p.nbytes for p in weights)
    assert sum(mapped_bytes(net) for net in adapter.modules().values()) == 0 < result < in_files / 2
    assert made.now >= result - lora, "everything was allocated anew"
    assert made.most <= result + 12 * largest, (made.most, result, largest)


# ---- what cannot fit ------------------------------------------------------------------------------------------------


def config(place, **over):
    return from_dict(settings(place, "memory", **over))


def opened(config, encoders):
    """The model of a run and its policy, ready to train."""
    adapter = open_adapter(config, CPU, encoders)
    parallelize(adapter, config, ALONE)
    return adapter, open_policy(config, make_objective(config.train), adapter)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("encoders", [True, False])
def test_the_bytes_are_those_of_the_loaded_model(place, rank, encoders):
    c = config(place, train={"lora_rank": rank})
    adapter, policy = opened(c, encoders)
    real = sum(static_bytes(adapter, policy).values())
    lora = 16 * sum(p.numel() for p in policy.params) if rank else 0
    counted = sum(certain_bytes(c, place / "flux", encoders).values())
    assert 0.99 * real <= counted + lora <= real  # buffers are not in the headers


def test_a_base_in_fp8_is_never_counted_too_large(place):
    """Nor are the bytes that a start prints those of another dtype."""
    c = config(place, dtype="bf16", fp8_base=True)
    adapter, policy = opened(c, False)
    real = static_bytes(adapter, policy)
    counted = certain_bytes(c, place / "flux", False)
    before, _ = opened(config(place, dtype="bf16"), False)
    assert sum(counted.values()) <= sum(real.values())
    in_bf16 = sum(p.nbytes for p in before.transformer.parameters() if not p.requires_grad)
    in_fp8 = sum(p.nbytes for p in adapter.transformer.parameters() if not p.requires_grad)
    assert in_bf16 - in_fp8 == static_bytes(before, policy)["weights"] - real["weights"] > 0.3 * in_bf16


def test_what_does_not_fit_is_named_part_by_part(place, monkeypatch):
    def refusal(parts, memory):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
        try:
            check_memory(parts, torch.device("cuda"))
        except ConfigError as error:
            return str(error)
        return ""

    c = config(place, train={"lora_rank": 0})
    parts = certain_bytes(c, place / "flux", True)
    whole = sum(parts.values())
    assert refusal(parts, whole + 1) == ""
    message = refusal(parts, whole)
    assert all(name in message for name in ("transformer", "text_encoder", "text_encoder_2", "vae"))
    assert all(field in message for field in ("data.cache", "offload", "parallel.shard", "train.lora_rank"))
    cached = refusal(certain_bytes(c, place / "flux", False), 1000)
    assert "transformer " in cached and "text_encoder_2 " not in cached
    check_memory(parts, CPU)


def test_every_field_that_is_named_makes_its_part_smaller(place):
    def counted(**over):
        return certain_bytes(config(place, **over), place / "flux", True)

    before = counted(train={"lora_rank": 0})
    sharded = counted(train={"lora_rank": 0}, parallel={"shard": 4})
    assert sharded["transformer"] == before["transformer"] // 4
    assert counted()["transformer"] < before["transformer"]
    assert 2 * counted(fp8_base=True)["transformer"] <= counted(dtype="bf16")["transformer"]
    assert "vae" not in counted(offload=["vae"])


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("family", ["flux", "sd3", "qwen_image"])
def test_a_stored_velocity_has_the_counted_bytes(family, guided):
    """In bf16, and in fp32 where it is made of two predictions; FLUX has no second one."""
    case = case_of(family) if guided else case_of(family).unguided()
    adapter = load(case, dtype=torch.bfloat16)
    v = adapter.velocity(*two_samples(adapter, case))
    values = {"model": "m", "family": family, "data": {"prompts": "p"}, "rollout": {"guidance": case.guidance}}
    assert velocity_bytes(from_dict(values)) == v.element_size() == (4 if guided and family != "flux" else 2)


def test_gradients_are_kept_whole_where_half_of_the_memory_holds_them(place, monkeypatch):
    """And never with several denoisers, of which an update's last backward runs one. Kept attention gets a quarter of
    the rest, times the share of the blocks that are recomputed."""
    c = config(place, train={"lora_rank": 0, "gradient_checkpointing": 0.5})
    adapter, policy = opened(c, True)
    stored = stored_bytes(c, adapter.latent_shape(c.rollout), ALONE.layout, 1)
    needed = sum(static_bytes(adapter, policy).values()) + stored + 1000
    world = SimpleNamespace(equal_forwards=True, device=torch.device("cuda"), layout=ALONE.layout, size=1, any=bool)
    monkeypatch.setattr(memory, "whole_gradients", lambda policy: 1000)
    for total, once in ((2 * needed, True), (2 * needed - 1, False)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, m=total: SimpleNamespace(total_memory=m))
        assert memory.reduces_once(c, adapter, policy, world) == once
        assert memory.attention_limit(c, adapter, policy, world, once) == (total - needed + 1000 * (not once)) / 8
    assert (
        memory.attention_limit(c, adapter, policy, SimpleNamespace(**vars(world) | {"device": ALONE.device}), True)
        > 1e99
    )
    monkeypatch.setattr(type(adapter), "denoisers", ("transformer", "transformer_2"))
    assert not memory.reduces_once(c, adapter, policy, SimpleNamespace(**vars(world) | {"device": ALONE.device}))

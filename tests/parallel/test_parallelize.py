"""Every parallel layout against one process: the same samples, losses, gradients and first optimiser step.

Why these cases: a layout may only change where work is done. {data parallel, sharded weights, context parallel, and
pairs of these} × families that shard differently (joint text, masked text of varying length, cross-attention with two
experts) are compared with a single process; LoRA or all weights, dtype and kind of block in pairs, not as a product.
All cells of a family run in one process group. Whole runs follow: the files they write, and resuming on other layouts.
Ring attention, for which CPUs need a kernel, is in tests/parallel/test_ring.py.
"""

import os
import shutil
from dataclasses import replace
from inspect import signature
from pathlib import Path
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import all_end, fuse_on_cpu, ranks, train
from safetensors.torch import load_file
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh
from world import ALONE, Brightness, linked, merged, opened, perturb, recipe, rows, targets_of, tiny_world

from prefgrpo.config.loading import from_dict, load
from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.prompts import read_prompts
from prefgrpo.models import family as family_class
from prefgrpo.objectives import make_objective
from prefgrpo.parallel.parallelize import context_errors
from prefgrpo.parallel.shard import full_tensor, to_local
from prefgrpo.parallel.world import DIMENSIONS, Layout, World, join
from prefgrpo.rollout import render
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.rollout.generated_groups import GeneratedGroups
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.run import opening
from prefgrpo.run.errors import option_errors
from prefgrpo.run.opening import open_gradients
from prefgrpo.update.memory import static_bytes, stored_bytes
from prefgrpo.update.metrics import FACTS
from prefgrpo.update.policy import Policy
from prefgrpo.update.trajectory import TrajectoryGradients

P, G, LR = 4, 2, 1e-3
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
"""What FSDP2 calls; the second before torch 2.13. Can go when torch 2.13 is the floor."""

TEXTS = ["a cube", "two very blue balls on a large wooden table", "a red cube", "one small dog under a tree"]
CP = {"ulysses": 2}
LAYOUTS = {
    2: {"dp": {}, "shard": {"shard": 2}, "cp": CP},
    4: {"dp": {}, "shard": {"shard": 4}, "dp×shard": {"shard": 2}, "shard×cp": {"shard": 2} | CP, "dp×cp": CP},
}
FAMILIES = {
    "flux": {"rollout": {"batch_size": G}},
    "qwen_image": {"rollout": {"guidance": 4.0, "same_noise": True, "window_low": 1}},
    "wan22": {"rollout": {"batch_size": G, "frames": 5, "guidance": 4.0, "guidance_2": 3.0}},
}
"""Qwen-Image's prompts differ in length from batch to batch; each prompt's first step is computed once."""
CLIP = {"rollout": {"frames": 5}}
OTHERS = {
    "flux2": {"rollout": {"height": 64, "width": 64}, "data": {"max_length": 512}},
    "flux2_klein": {"rollout": {"height": 64, "width": 64}, "data": {"max_length": 64}},
    "flux3": {"data": {"max_length": 160}},
    "flux_kontext": {}, "hunyuan_video": CLIP, "hunyuan_video_15": CLIP | {"data": {"max_length": 1000}},
    "krea2": {"data": {"max_length": 256}},
    "ltx2": CLIP | {"data": {"max_length": 32}}, "qwen_image_21": {"data": {"max_length": 320}},
    "sd3": {}, "wan": CLIP, "wan22_i2v": CLIP, "wan_i2v": CLIP, "wan_ti2v": CLIP,
    "z_image": {},
}  # fmt: skip
"""LoRA runs with sharded weights, and with context parallelism where the family supports it."""


def settings(place, family, lora, dtype, layout):
    own = Path(f"{place}/{family}/prompts.jsonl")  # exists for image-to-video
    base = {
        "model": f"{place}/{family}", "family": family, "dtype": dtype, "parallel": layout,
        "data": {"prompts": str(own) if own.is_file() else f"{place}/prompts.txt", "max_length": 24},
        "rollout": {
            "height": 32, "width": 32, "steps": 4, "prompts_per_step": P, "group_size": G, "batch_size": G, "eta": 0.5,
        },
        "train": {"lora_rank": 4 if lora else 0, "lr": LR, "ema_decay": 0.5, "gradient_checkpointing": 1.0,
                  "kl_coef": 0.1 if lora else 0.0},
    }  # fmt: skip
    return from_dict(merged(base, (FAMILIES | OTHERS)[family]))


def one_step(config, world):
    """Runs one training step; returns its samples, gradients, weights and EMA, the loss and the largest |ratio − 1|."""
    prompts = read_prompts(Path(config.data.prompts))
    adapter = opened(config, world)
    kinds = {type(block).__name__ for net in adapter.modules().values() for block in adapter.blocks(net)}
    assert {"Fused" in kind for kind in kinds} == {"FUSED" in os.environ}, kinds
    if config.train.lora_rank:
        perturb(adapter, 0.02)
    policy = Policy(dict(adapter.trainable()), config.train)
    schedules = Schedules(config, adapter, world.device)
    embeddings = Embeddings(config)
    media = {}
    groups = GeneratedGroups(config, adapter, embeddings, schedules, prompts, world)
    plan = groups.plan(0)
    add = lambda group, member, sample: media.update({(group, member): sample.media.pixels})  # noqa: E731
    batches = list(groups.batches(plan, add))
    policy_gradients = open_gradients(config, make_objective(config.train), adapter, policy, world)
    if config.train.kl_coef:
        with policy_gradients.reference():
            batches = [policy_gradients.with_reference(batch) for batch in batches]
    of_steps = [t for b in batches for s in b.transitions for t in (s.x, s.x_next, s.v_ref) if t is not None]
    stored = [*(b.latents for b in batches), *of_steps]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in stored}
    most = stored_bytes(config, adapter.latent_shape(config.rollout), world.layout, world.size)
    assert max(world.all_gather_object(sum(sizes.values()))) == most, (
        config.family,
        config.dtype,
        sum(sizes.values()),
        most,
    )
    advantage = torch.randn(P, G, generator=torch.Generator().manual_seed(5))
    columns = (*FACTS, *policy_gradients.metrics)
    table = [
        dict(zip(columns, row.tolist(), strict=True))
        for row in policy_gradients.accumulate(batches, targets_of(advantage), P * G)
    ]
    moved = max((abs(row[name] - 1) for row in table for name in ("ratio_min", "ratio_max")), default=0.0)
    samples = {}
    for batch in (b for b in batches if not b.padding):
        steps = [policy_gradients.whole(step) for step in batch.transitions]
        for row, slot in enumerate(zip(batch.slots, batch.members, strict=True)):
            samples[slot] = [t[row].float() for step in steps for t in (step.x, step.x_next)]
    held = {}
    gradients = {}
    real = policy.optimizer.step

    def note_gradients():
        found = {name: p.grad for name, p in policy.parameters.items() if p.grad is not None}
        unused = [p for p in policy.params if p.grad is None]  # Qwen-Image's last text layers; counted all the same
        held["gradients"] = local_bytes(found.values()) + local_bytes(unused)
        gradients.update({name: full_tensor(grad).clone() for name, grad in found.items()})
        real()

    policy.optimizer.step = note_gradients
    policy.update(world, 0)
    moments = [t for state in policy.optimizer.state.values() for key, t in state.items() if key != "step"]
    held |= {"AdamW": local_bytes(moments), "EMA": local_bytes(policy.ema.values())}
    known = static_bytes(adapter, policy)
    assert {kind: known[kind] for kind in held} == held
    media = dict(world.gather_items((place, torch.from_numpy(pixels).float()) for place, pixels in media.items()))
    return {
        "samples": {place: [*stored, media[place]] for place, stored in world.gather_items(samples.items())},
        "loss": float(world.gather(np.array([sum(row["loss"] for row in table)], np.float64)).sum()),
        "gradients": gradients,
        "weights": {name: full_tensor(p.detach()).clone() for name, p in policy.parameters.items()},
        "ema": {name: full_tensor(p).clone() for name, p in policy.ema.items()},
        "moved": max(world.all_gather_object(moved)),
    }


def local_bytes(tensors):
    """Bytes of this process's storages."""
    return sum(t.numel() * t.element_size() for t in to_local(tensors))


def far(got, want):
    """Largest absolute difference between two lists or dicts of tensors, and the largest absolute element of `want`."""
    keys = want.keys() if isinstance(want, dict) else range(len(want))
    assert len(got) == len(want)
    return max(float((got[k] - want[k]).abs().max()) for k in keys), max(float(want[k].abs().max()) for k in keys)


def cells():
    """Runs in the new process: all cells of the families in $FAMILY; a failure shows as a non-zero exit code."""
    torch.set_num_threads(1)
    if "FUSED" in os.environ:
        fuse_on_cpu()
    place = os.environ["PLACE"]
    size = int(os.environ["WORLD_SIZE"])
    for family in os.environ["FAMILY"].split():
        layouts = LAYOUTS[size]
        if family in OTHERS:
            layouts = {"shard": {"shard": size}} | ({"cp": CP} if family_class(family).context_parallel else {})
        for lora in (True, False)[: 1 if family in OTHERS else 2]:
            for dtype in dtypes_of(family, lora, size):
                configs = {name: settings(place, family, lora, dtype, layout) for name, layout in layouts.items()}
                worlds = {name: join(config) for name, config in configs.items()}
                want = by_one_process(settings(place, family, lora, dtype, {}))
                for name, config in configs.items():
                    cell = f"{family} {'LoRA' if lora else 'all weights'} {dtype} {name}"
                    noise = config.rollout.window_low == 0
                    compare(cell, one_step(config, worlds[name]), want, "cp" not in name, noise, dtype)
    os._exit(0)


def dtypes_of(family, lora, size):
    """bf16 on two processes only, and with all weights only of Wan2.2, whose two experts are the most special case."""
    if "FUSED" in os.environ:
        return ("bf16",) if lora else ("fp32",)
    trains_here = lora or family == "wan22"
    if size == 4:
        return ("fp32",) if trains_here else ()
    return ("fp32", "bf16") if trains_here and family not in OTHERS else ("fp32",)


def by_one_process(config):
    """What rank 0 makes without the others, which would make the same; any size of process group reads it."""
    world = alone(config)
    parts = config.family, config.dtype, config.train.lora_rank, "FUSED" in os.environ
    file = Path(os.environ["PLACE"], "_".join(map(str, parts)) + ".pt")
    if dist.get_rank() == 0 and not file.exists():
        torch.save(one_step(config, world), file)
    dist.barrier()
    return torch.load(file)


def alone(config):
    """A world of one process inside a larger process group."""
    layout = Layout.of(config, 1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1, 1, 1), mesh_dim_names=DIMENSIONS)
    return World(0, 1, ALONE.device, layout, mesh if layout.fsdp else None)


def compare(cell, got, want, bits, noise=True, dtype="fp32"):
    """Fails unless two results of `one_step` agree; with `bits`, the samples must be bit-identical, with `noise`, the
    first stored latents. In bf16, context parallelism changes what is rounded: gradients differ by up to 5 %."""
    rounds = dtype == "bf16" and not bits
    limit = 0.05 if rounds else 1e-5
    assert got["samples"].keys() == want["samples"].keys(), cell
    assert got["moved"] == 0, f"{cell}: the first ratio is not exactly 1"
    for sample, stored in want["samples"].items():
        own = got["samples"][sample]
        assert torch.equal(own[0], stored[0]) or not noise, f"{cell}: initial noise differs"
        assert far(own[:-1], stored[:-1])[0] <= (0 if bits else limit), f"{cell}: latents differ"
        assert far(own[-1:], stored[-1:])[0] <= (0 if bits else 100 * limit if rounds else 1), f"{cell}: pixels differ"
    assert abs(got["loss"] - want["loss"]) <= limit * abs(want["loss"]), cell
    difference, largest = far(got["gradients"], want["gradients"])
    assert difference <= limit * largest, (cell, "gradients", difference, largest)
    for kind in ("weights", "ema") if not rounds else ():  # AdamW's first step is the gradient's sign
        difference, largest = far(got[kind], want[kind])
        assert difference <= 0.02 * LR, (cell, kind, difference, largest)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = linked(tmp_path_factory.mktemp("mesh"), FAMILIES | OTHERS)
    (folder / "prompts.txt").write_text("\n".join(TEXTS) + "\n")
    return folder


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize("size, env", [(2, {}), (4, {}), (2, {"FUSED": "1"})], ids=["2", "4", "2 with fused blocks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout_changes_nothing(place, family, size, env):
    file = place / f"{family}{size}{''.join(env)}.yaml"
    all_end(ranks(file, size, hook=cells, PLACE=str(place), FAMILY=family, **env), seconds=600)


@pytest.mark.dist
@pytest.mark.full
def test_a_layout_changes_nothing_in_any_family(place):
    families = " ".join(OTHERS)
    all_end(ranks(place / "others.yaml", 2, hook=cells, PLACE=str(place), FAMILY=families), seconds=1500)


def replicas():
    """Runs in the new process: what two replicas of weights sharded over two processes send, and make groups for, and
    that reducing gradients over the shards in every backward gives the same."""
    torch.set_num_threads(1)
    made = count_calls(device_mesh, "new_group")
    config = settings(os.environ["PLACE"], "flux", False, "fp32", {"shard": 2})
    world = join(config)
    assert (len(made), world.mesh.mesh_dim_names) == (4, ("replicate", "shard")), made
    reduced = count_calls(dist, "all_reduce")
    scattered = count_calls(dist, SCATTER)
    in_backward = []
    accumulate = TrajectoryGradients.accumulate

    def counted(gradients, batches, *given):
        reduced.clear()
        scattered.clear()
        table = accumulate(gradients, batches, *given)
        in_backward.append((sum(len(batch.transitions) for batch in batches), len(scattered), len(reduced)))
        return table

    one = settings(os.environ["PLACE"], "flux", False, "fp32", {})
    want = one_step(one, alone(one))
    for once in (True, False):
        with (
            mock.patch.object(TrajectoryGradients, "accumulate", counted),
            mock.patch.object(opening, "reduces_once", lambda *_, once=once: once),
        ):
            compare(f"replicas, once: {once}", one_step(config, world), want, bits=True)
            assert len(reduced) >= 2, "which gradients there are, and their sums"
    (backwards, once, _), (_, every, _) = in_backward
    assert backwards > 1 and once > 0 and every == once * backwards and not any(count for *_, count in in_backward)
    os._exit(0)


def count_calls(module, name):
    """Replaces a function by one that notes its calls in the returned list."""
    calls = []
    real = getattr(module, name)
    setattr(module, name, lambda *given, **named: (calls.append(given), real(*given, **named))[1])
    return calls


@pytest.mark.full
@pytest.mark.dist
def test_replicas_reduce_their_gradients_once_per_update(place):
    """Not after every backward, over shards too; and a mesh makes groups for its dimensions above 1 only."""
    all_end(ranks(place / "replicas.yaml", 4, hook=replicas, PLACE=str(place)), seconds=300)


def lengths():
    """Runs in the new process: a guided step in which one text of four is as long as the negative prompt."""
    torch.set_num_threads(1)
    config = settings(os.environ["PLACE"], "qwen_image", True, "fp32", {"shard": 2})
    whole = replace(config.data, max_length=320)  # 24 tokens would truncate all texts to one length
    config = replace(config, data=whole, rollout=replace(config.rollout, negative_prompt=TEXTS[0]))
    result = one_step(config, join(config))
    assert (len(result["samples"]), result["moved"]) == (P * G, 0)
    os._exit(0)


@pytest.mark.dist
def test_sharded_processes_run_equally_many_forwards_whatever_the_lengths(place):
    """Every forward of sharded weights is a collective: a process that joined the texts of a pair where the other ran
    two forwards would wait forever."""
    all_end(ranks(place / "lengths.yaml", 2, hook=lengths, PLACE=str(place)), seconds=120)


def decoding():
    """Runs in the new process: counts the samples that this process decodes, gets as pixels, and hands on."""
    torch.set_num_threads(1)
    config = settings(os.environ["PLACE"], "wan", True, "fp32", {"ulysses": 2})
    config = replace(config, rollout=replace(config.rollout, batch_size=1))
    world = join(config)
    seen = {"decoded": 0, "kept": 0}
    real = render.decode

    def decode(adapter, latents, sizes):
        seen["decoded"] += len(latents)
        return real(adapter, latents, sizes)

    def add(group, member, sample):
        assert sample.media.pixels.dtype == np.uint8 and sample.media.frame_rate == 16
        seen["kept"] += 1

    adapter = opened(config, world)
    parts = (adapter, Embeddings(config), Schedules(config, adapter, world.device), read_prompts(config.data.prompts))
    with mock.patch.object(render, "decode", decode):
        groups = GeneratedGroups(config, *parts, world)
        list(groups.batches(groups.plan(0), add))
    leader = world.rank % 2 == 0
    assert seen == {"decoded": P * G // world.size, "kept": 2 * P * G // world.size if leader else 0}, seen
    os._exit(0)


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 4])
def test_a_clip_is_decoded_by_one_context_parallel_process_and_kept_by_one(place, size):
    all_end(ranks(place / f"decoding{size}.yaml", size, hook=decoding, PLACE=str(place)), seconds=300)


def compiled():
    """Runs in the new process: compiled, sharded blocks against eager, unsharded ones."""
    torch.set_num_threads(1)
    place, layout = os.environ["PLACE"], {"shard": 2}
    want = one_step(settings(place, "flux", True, "fp32", {}), ALONE)
    config = replace(settings(place, "flux", True, "fp32", layout), compile=True)
    got = one_step(config, join(config))
    assert got["moved"] <= 1e-6, "rollout and replay run different graphs"
    compare("compiled", got | {"moved": 0.0}, want, bits=False)
    os._exit(0)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.timeout(1800)
def test_compiled_blocks_train_as_eager_ones(place):
    """Rollout and replay must run the same graph, or the first ratio is not 1; gradients must match eager blocks."""
    all_end(ranks(place / "compiled.yaml", 2, hook=compiled, PLACE=str(place)), seconds=1700)


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_place(tmp_path_factory):
    return tiny_world(tmp_path_factory.mktemp("runs"))


def final(folder):
    """The exported weights of a finished run."""
    return load_file(next((folder / "pipeline" / "transformer").glob("*.safetensors")))


@pytest.mark.dist
@pytest.mark.full
def test_split_weights_are_resumed_on_any_layout(run_place):
    """Two processes stopped and resumed give bit-identical weights to an uninterrupted run; one process can resume a
    two-process checkpoint and vice versa, and both end at the same weights within a tolerance."""
    runs = run_place / "runs"
    trained = {"lora_rank": 0, "ema_decay": 0.5, "lr": 1e-4, "objective": "nft"}  # nft also stores an old policy
    options = {"train": trained, "eval": {"every": 0}}
    two = {"parallel": {"shard": 2}}
    all_end(ranks(recipe(run_place, "straight", **options, **two), 2), seconds=600)
    assert train(recipe(run_place, "one", **options))[0] == 0
    all_end(ranks(recipe(run_place, "two_two", **options, **two), 2, "--train.steps", "2"), seconds=600)
    shutil.copytree(runs / "two_two", runs / "two_one")
    assert train(recipe(run_place, "one_two", **options), "--train.steps", "2")[0] == 0
    parts = runs / "two_two" / "checkpoints" / "step_000002"
    assert sorted(p.name for p in parts.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    all_end(ranks(recipe(run_place, "two_two", **options, **two), 2, "--resume"), seconds=600)
    all_end(ranks(recipe(run_place, "one_two", **options, **two), 2, "--resume"), seconds=600)
    code, output = train(recipe(run_place, "two_one", **options), "--resume")
    assert code == 0 and "resumed from" in output, output
    want, start = final(runs / "one"), load_file(next((run_place / "flux" / "transformer").glob("*.safetensors")))
    assert max(float((want[k] - start[k]).abs().max()) for k in want) > 1e-4, "training changed nothing"
    straight, resumed = (final(runs / name) for name in ("straight", "two_two"))
    assert straight.keys() == want.keys() and all(torch.equal(straight[k], resumed[k]) for k in want)
    for name in ("straight", "two_one", "one_two"):
        got = final(runs / name)
        assert far(got, want)[0] < 0.02 * 1e-4 * 4, name
        rewards = [[row["reward/jpeg_compressibility"] for row in rows(runs / n)] for n in (name, "one")]
        assert rewards[0] == pytest.approx(rewards[1], rel=1e-3)
    page = (runs / "straight" / "pipeline" / "transformer" / "config.json").read_text()
    assert '"FluxTransformer2DModel"' in page
    damaged = next((runs / "straight" / "checkpoints" / "step_000004").glob("__1_*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again = ranks(recipe(run_place, "straight", **options, **two), 2, "--resume")
    first, second = all_end(again, 2, seconds=600)
    assert "__1_0.distcp should have" in first and "see the error message of rank 0" in second
    shutil.rmtree(runs / "straight" / "checkpoints" / "step_000004")
    output, _ = all_end(ranks(recipe(run_place, "straight", **options, **two), 2, "--resume"), seconds=600)
    assert "step_000002" in output.partition("resumed from")[2].splitlines()[0]
    assert all(torch.equal(straight[k], weight) for k, weight in final(runs / "straight").items())


class OnlyTheFirstIsAsked(Brightness):
    """Fails on any rank but 0: in a context-parallel group only the first rank scores the shared samples."""

    def ask(self, asked):
        assert os.environ.get("RANK", "0") == "0"
        return super().ask(asked)


@pytest.mark.dist
def test_a_run_of_context_parallel_processes(run_place):
    """Rewards, evaluation and exported weights match a single process: each sample is scored and counted once."""
    spec = {"rewards": f"{__name__}.OnlyTheFirstIsAsked", "train": {"steps": 2}}
    spec["eval"] = {"rewards": f"{__name__}.OnlyTheFirstIsAsked", "every": 2}
    all_end(ranks(recipe(run_place, "cp", parallel={"ulysses": 2}, **spec), 2), seconds=600)
    assert train(recipe(run_place, "alone", **spec))[0] == 0
    got, want = (rows(run_place / "runs" / name) for name in ("cp", "alone"))
    assert [(r["kind"], r["step"]) for r in got] == [(r["kind"], r["step"]) for r in want]
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for key in ("reward/missing", "samples_trained", "policy/on_policy_error"):
            assert a.get(key) == b.get(key), key
        for key in (k for k in a if "OnlyTheFirstIsAsked" in k or k == "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-2, abs=1e-3), key
    lora = [load_file(run_place / "runs" / n / "lora" / "pytorch_lora_weights.safetensors") for n in ("cp", "alone")]
    assert lora[0].keys() == lora[1].keys()
    difference, largest = far(*lora)
    assert difference < 0.01 * largest


# ---- combinations that are refused ----------------------------------------------------------------------------------


PUBLISHED = {
    "wan 480p": ("wan", (480, 832, 81), {"ulysses": 4}, 0, ""),
    "wan heads": ("wan", (480, 832, 81), {"ulysses": 8}, 0, "12 attention heads"),
    "wan 16": ("wan", (480, 832, 81), {"ring": 16}, 0, "tokens, got 32760"),
    "flux": ("flux", (1024, 1024, None), {"ulysses": 8}, 512, ""),
    "flux 720": ("flux", (720, 720, None), {"ulysses": 2}, 512, "tokens, got 2025"),
    "flux text": ("flux", (1024, 1024, None), {"ulysses": 8}, 300, "the next is 304"),
    "qwen": ("qwen_image", (1328, 1328, None), {"ulysses": 2}, 0, "tokens, got 6889"),
}
"""Token counts: 21·30·52 = 32760 for a Wan clip, 64² = 4096 and 45² = 2025 for FLUX images, 83² for a Qwen image."""
FOUR = {
    "block_out_channels": (32,) * 4, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}  # fmt: skip
PARTS = {
    "flux": ("FluxTransformer2DModel", {}, "AutoencoderKL", FOUR),
    "wan": ("WanTransformer3DModel", {"num_attention_heads": 12}, "AutoencoderKLWan", {}),  # 1.3B
    "qwen_image": ("QwenImageTransformer2DModel", {}, "AutoencoderKLQwenImage", {}),
}
"""Denoiser and VAE of each family, with what differs from diffusers' defaults, which are the published models."""


def published(name, **sizes):
    """The adapter of a published model without weights, with one block; sizes: where it differs from PARTS."""
    denoiser, own, vae, scaled = PARTS[name]
    own = own | sizes
    cls = family_class(name)
    pipeline = getattr(diffusers, cls.pipeline)
    with torch.device("meta"):
        parts = {
            "transformer": getattr(diffusers, denoiser)(num_layers=1, **own), "vae": getattr(diffusers, vae)(**scaled),
        }  # fmt: skip
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler()
    return cls(pipeline(**dict.fromkeys(signature(pipeline).parameters) | parts))


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_models_are_divided_by_arithmetic(case):
    name, (height, width, frames), layout, length, text = PUBLISHED[case]
    sizes = SamplingConfig(height=height, width=width, frames=frames)
    problems = context_errors(published(name), "rollout", sizes, length or 512, Layout(**layout))
    assert (text in problems[0] and len(problems) == 1) if text else not problems, problems


@pytest.mark.parametrize("recipe", ["lora_wan_480p", "lora_wan_480p_small", "lora_wan22_480p"])
def test_the_recipes_of_long_clips_are_divided(recipe, root):
    """At the published size, for the 40 heads of the 14B models."""
    config = load(root / "scripts" / "prefgrpo" / f"{recipe}.yaml")
    r, p = config.rollout, config.parallel
    assert (r.height, r.width, r.frames, p.ulysses) == (480, 832, 81, 8)
    assert not context_errors(
        published("wan", num_attention_heads=40), "rollout", r, config.data.max_length, Layout(ulysses=p.ulysses)
    )
    assert not option_errors(config)

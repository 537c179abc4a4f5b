"""Every model family against the stock diffusers pipeline, on tiny random weights.

Why these cases: an adapter may err in conditioning, time, shift, guidance, packing or decode, and each shows as a
difference from the stock pipeline's image (noise 0). What it then trains must be what it samples (ratio 1), follow
the gradient of a plain Gaussian log-prob, and load in a process that never heard of this package. A family is added
by one line in families.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from families import (
    CASES,
    PROMPTS,
    RESIZERS,
    SIZES,
    conditions,
    draw,
    folder,
    load,
    noise,
    perturb,
    small_sources,
    stock_image,
)
from family_ranks import TOTAL, samples
from safetensors.torch import load_file, save_file

from prefgrpo.models import family
from prefgrpo.models.folder import ModelError
from prefgrpo.rollout.embed import Embeddings, select
from prefgrpo.rollout.replay import replay
from prefgrpo.rollout.rollout import rollout
from prefgrpo.sde.schedule import make_schedule

pytestmark = pytest.mark.families
every = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def _small():
    with small_sources():
        yield


@every
@pytest.mark.parametrize(("steps", "size"), [(2, SIZES[0]), (7, SIZES[1])])
@pytest.mark.parametrize("shifting", ["published keys", "other shift"])
def test_noise_zero_is_the_stock_pipeline(case, shifting, steps, size):
    if shifting == "other shift" and not case.dynamic:
        pytest.skip(f"{case.family} has only one kind of shift in its stock pipeline")
    path = folder(case.family)
    if shifting == "other shift":
        static = not case.pipe(path).scheduler.config.use_dynamic_shifting
        path = folder(case.family, use_dynamic_shifting=static, shift=5.0)
    adapter, pipe = load(case, path), case.pipe(path)
    x0 = noise(adapter, size)
    want = stock_image(pipe, case, x0, size, steps)
    got = draw(adapter, case, x0, size, steps)
    assert got.shape == want.shape == (2, *((case.frames,) if case.frames else ()), 3, *size)
    assert want.std() > 0.01
    assert (got - want).abs().max() <= 1e-5


@pytest.mark.parametrize("case", [case for case in CASES if family(case.family).cfg], ids=str)
def test_without_guidance_it_is_the_stock_pipeline_too(case):
    unguided = case.unguided()
    adapter = load(
        unguided, folder(case.family), **({"guidance_2": case.off} if family(case.family).default_guidance_2 else {})
    )
    assert not adapter.guided and not any(key.startswith("negative") for key in conditions(adapter, unguided))
    pipe = case.pipe(folder(case.family))
    x0 = noise(adapter, SIZES[1])
    got, want = draw(adapter, unguided, x0, SIZES[1], 3), stock_image(pipe, unguided, x0, SIZES[1], 3)
    assert (got - want).abs().max() <= 1e-5
    assert (got - draw(load(case, folder(case.family)), case, x0, SIZES[1], 3)).abs().max() > 1e-4


@every
@pytest.mark.parametrize("checkpointing", [False, True])
def test_first_ratio_is_exactly_one(case, checkpointing):
    adapter = load(case, folder(case.family))
    adapter.add_lora(4, 8.0)
    perturb(adapter)
    if checkpointing:
        adapter.checkpoint_gradients()
    condition = conditions(adapter, case, size=SIZES[1])
    schedule = make_schedule(adapter.sigmas(4, *SIZES[1]), "flow", 0.7, (0, 1, 2))
    kwargs = {"height": SIZES[1][0], "width": SIZES[1][1]}
    done = rollout(adapter, schedule, condition, torch.tensor([5, 9]), seed=1, **kwargs)
    assert len(done.steps) == 3
    for step in done.steps:
        new = replay(adapter, schedule, condition, step, **kwargs)
        new.logp.sum().backward()
        assert (torch.exp(new.logp - step.logp) - 1).abs().max() == 0.0
    unused = [name for name, p in adapter.trainable() if "lora_B" in name and p.grad is None]
    assert not unused or case.family.startswith("qwen"), "Qwen-Image's last block has a text half that goes nowhere"


@every
def test_gradient_is_that_of_the_normal_log_prob(case):
    """Oracle: torch.distributions.Normal on the published mean and std of Flow-GRPO, in fp64 autograd."""
    size, eta = SIZES[0], 0.7
    adapter = load(case, folder(case.family))
    adapter.add_lora(4, 8.0)
    perturb(adapter)
    condition = conditions(adapter, case)
    schedule = make_schedule(adapter.sigmas(4, *size), "flow", eta, (1,))
    done = rollout(adapter, schedule, condition, torch.tensor([5, 9]), seed=1, height=size[0], width=size[1])
    (step,) = done.steps
    advantage = torch.tensor([1.0, -0.5])

    new = replay(adapter, schedule, condition, step, height=size[0], width=size[1])
    (new.logp * advantage).sum().backward()
    got = {name: p.grad.clone() for name, p in adapter.trainable() if p.grad is not None}
    for _, p in adapter.trainable():
        p.grad = None

    s, t = schedule.sigmas[1].double(), schedule.sigmas[2].double()
    v = adapter.velocity(step.x, schedule.sigmas[1].expand(2), condition, *size).double()
    x, dt = step.x.double(), t - s
    std = eta * torch.sqrt(s / (1 - s))
    mean = x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt
    logp = torch.distributions.Normal(mean, std * torch.sqrt(-dt)).log_prob(step.x_next.double()).flatten(1).mean(1)
    assert torch.allclose(logp.float(), new.logp, rtol=1e-5)
    (logp * advantage).sum().backward()
    for name, p in adapter.trainable():
        if p.grad is not None:
            assert torch.allclose(got[name], p.grad, rtol=1e-3, atol=1e-4 * float(p.grad.abs().max())), name


STOCK = """
import importlib, json, sys
import diffusers, torch
from PIL import Image
from safetensors.torch import load_file, save_file
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    module.calculate_dimensions = lambda area, ratio, real=module.calculate_dimensions: real(area / 256, ratio)
for line in sys.stdin:
    a = json.loads(line)
    pipe = getattr(diffusers, a["pipeline"]).from_pretrained(a["model"])
    pipe.load_lora_weights(a["lora"])
    if a["experts"] > 1:
        pipe.load_lora_weights(a["lora"] + "/transformer_2", load_into_transformer_2=True)
    pipe.set_progress_bar_config(disable=True)
    if "solver_order" in pipe.scheduler.config:  # sampling is first-order
        first = {"solver_order": 1, "disable_corrector": list(range(a["call"]["num_inference_steps"]))}
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **first)
    x = load_file(a["latents"])["x"]
    call = {"output_type": "pt", **a["call"]}
    if a["images"]:
        call = {k: v[:1] if isinstance(v, list) else v for k, v in call.items()}
        opened = [[Image.open(file) for file in own] for own in a["images"]]
        each = zip(a["prompts"], [own if len(own) > 1 else own[0] for own in opened], x[:, None])
        image = torch.cat([pipe(prompt=[p], image=own, latents=one, **call)[0] for p, own, one in each])
    else:
        image = pipe(prompt=a["prompts"], latents=x, **call)[0]
    assert not any(name.split(".")[0] == "prefgrpo" for name in sys.modules)
    save_file({"image": image.contiguous()}, a["out"])
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def stock_process(tmp_path_factory):
    """A process that never imports this package; one for all families, because importing diffusers takes seconds."""
    log = tmp_path_factory.mktemp("stock") / "stderr"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", STOCK, *RESIZERS[:2]],
            stdin=PIPE,
            stdout=PIPE,
            stderr=errors,
            text=True,
            cwd=log.parent,
        )
        yield process, log
        process.stdin.close()
        assert process.wait(60) == 0


def in_a_stock_process(process, case, adapter, x0, size, steps, tmp_path, model, lora):
    process, log = process
    save_file({"x": x0}, tmp_path / "x.safetensors")
    call = case.call | {"height": size[0], "width": size[1], "num_inference_steps": steps}
    images = []
    for number in range(len(PROMPTS) if case.edit else 0):
        images.append([str(tmp_path / f"source{number}_{k}.png") for k in range(case.sources)])
        for name, source in zip(images[-1], case.images(number, size), strict=True):
            source.save(name)
    call |= case.edit(*size) if case.edit else {}
    arguments = {
        "pipeline": case.stock or adapter.pipeline, "model": str(model), "lora": lora,
        "latents": str(tmp_path / "x.safetensors"), "experts": len(adapter.denoisers), "prompts": PROMPTS,
        "images": images, "call": call, "out": str(tmp_path / "image.safetensors"),
    }  # fmt: skip
    process.stdin.write(json.dumps(arguments) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n", log.read_text()[-2000:]
    return load_file(tmp_path / "image.safetensors")["image"]


@every
def test_lora_loads_in_stock_diffusers_with_its_alpha(case, tmp_path, stock_process):
    path, size = folder(case.family), SIZES[0]
    adapter = load(case, path)
    x0 = noise(adapter, size)
    before = draw(adapter, case, x0, size, 3)
    adapter.add_lora(4, 12.0, seed=3)
    assert torch.equal(draw(adapter, case, x0, size, 3), before), "a fresh LoRA must change nothing"
    perturb(adapter, 0.2)
    after = draw(adapter, case, x0, size, 3)
    assert (after - before).abs().max() > 1e-3
    with adapter.reference():
        assert torch.equal(draw(adapter, case, x0, size, 3), before)
    assert torch.equal(draw(adapter, case, x0, size, 3), after)

    adapter.save_lora(str(tmp_path / "lora"))
    written = sorted(str(f.relative_to(tmp_path / "lora")) for f in (tmp_path / "lora").rglob("*.safetensors"))
    assert (
        written
        == ["pytorch_lora_weights.safetensors", "transformer_2/pytorch_lora_weights.safetensors"][
            : len(adapter.denoisers)
        ]
    )
    image = in_a_stock_process(stock_process, case, adapter, x0, size, 3, tmp_path, path, str(tmp_path / "lora"))
    assert (image - after).abs().max() <= 1e-5

    for prepare in (lambda a: None, lambda a: a.add_lora(4, 12.0, seed=8)):
        again = load(case, path)
        prepare(again)
        again.load_lora(str(tmp_path / "lora"))
        assert torch.equal(draw(again, case, x0, size, 3), after)
        assert all(torch.equal(p, q) for (_, p), (_, q) in zip(again.trainable(), adapter.trainable(), strict=True))


@every
def test_full_fine_tune_loads_in_stock_diffusers(case, tmp_path):
    path, size = folder(case.family), SIZES[0]
    adapter = load(case, path)
    x0 = noise(adapter, size)
    before = draw(adapter, case, x0, size, 3)
    adapter.enable_full(keep_reference=True)
    assert len(adapter.trainable()) == sum(1 for module in adapter.modules().values() for _ in module.parameters())
    perturb(adapter, 0.02)
    after = draw(adapter, case, x0, size, 3)
    with adapter.reference():
        assert torch.equal(draw(adapter, case, x0, size, 3), before)
    adapter.save_full(str(tmp_path / "full"))
    again = load(case, tmp_path / "full")
    assert torch.equal(draw(again, case, x0, size, 3), after), "a reloaded policy is bitwise the same"
    pipe = case.pipe(tmp_path / "full")
    assert (stock_image(pipe, case, x0, size, 3) - after).abs().max() <= 1e-5
    assert (after - before).abs().max() > 1e-3


@every
def test_a_batch_is_its_samples(case):
    size = SIZES[0]
    adapter = load(case, folder(case.family))
    condition = conditions(adapter, case, [*PROMPTS, *PROMPTS])
    schedule = make_schedule(adapter.sigmas(4, *size), "flow", 0.7, (0, 1))
    ids = torch.tensor([3, 1 << 40, 17, 4])
    kwargs = {"seed": 11, "height": size[0], "width": size[1]}
    whole = rollout(adapter, schedule, condition, ids, **kwargs)
    for i in range(4):
        rows = torch.tensor([i])
        alone = rollout(adapter, schedule, select(condition, rows), ids[rows], **kwargs)
        assert torch.equal(alone.steps[0].x, whole.steps[0].x[rows]), "initial noise is addressed by sample id"
        assert (alone.latents - whole.latents[rows]).abs().max() <= 1e-5 * max(1.0, float(whole.latents.abs().max()))
        for a, b in zip(alone.steps, whole.steps, strict=True):
            assert torch.allclose(a.logp, b.logp[rows], atol=1e-5)


@every
def test_a_sliced_vae_decodes_the_same(case):
    adapter = load(case, folder(case.family))
    x = noise(adapter, SIZES[1])
    whole, seen = adapter.decode(x, *SIZES[1]), set()
    adapter.vae_options(slicing=True, tiling=False)
    adapter.pipe.vae.decoder.register_forward_pre_hook(lambda module, args: seen.add(len(args[0])))
    assert (adapter.decode(x, *SIZES[1]) - whole).abs().max() <= 1e-5
    assert seen == {1}, "one sample, or one frame of it, at a time"
    adapter.vae_options(slicing=False, tiling=True)
    tiled = adapter.decode(x, *SIZES[1])
    assert adapter.pipe.vae.use_tiling and tiled.shape == whole.shape and torch.isfinite(tiled).all()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two processes made of every family; one torchrun for all."""
    out = tmp_path_factory.mktemp("ranks")
    script = str(Path(__file__).with_name("family_ranks.py"))
    (out / "folders.json").write_text(json.dumps({case.family: str(folder(case.family)) for case in CASES}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script, str(out)]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=found)
    assert done.returncode == 0, done.stderr[-3000:]
    return [load_file(out / f"{rank}.safetensors") for rank in range(2)]


@pytest.mark.dist
def test_two_processes_make_the_samples_of_one(two_ranks):
    """One test for all families, so that xdist starts one torchrun."""
    for case in CASES:
        for kind, whole in zip(("x", "logp"), samples(case, folder(case.family), range(TOTAL)), strict=True):
            for rank, found in enumerate(two_ranks):
                assert (found[f"{case}/{kind}"] - whole[rank::2]).abs().max() <= 1e-5, (str(case), kind)


@every
def test_bf16_base_with_fp32_lora_trains(case):
    size = SIZES[0]
    adapter = load(case, folder(case.family), torch.bfloat16)
    adapter.add_lora(4, 8.0)
    perturb(adapter)
    assert {p.dtype for _, p in adapter.trainable()} == {torch.float32}
    assert adapter.dtype == torch.bfloat16 and torch.bfloat16 in {p.dtype for p in adapter.transformer.parameters()}
    condition = conditions(adapter, case)
    schedule = make_schedule(adapter.sigmas(3, *size), "flow", 0.7, (0, 1))
    done = rollout(adapter, schedule, condition, torch.arange(2), seed=0, height=size[0], width=size[1])
    assert torch.isfinite(adapter.decode(done.latents, *size)).all()
    for step in done.steps:
        new = replay(adapter, schedule, condition, step, height=size[0], width=size[1], kl="gaussian")
        assert (torch.exp(new.logp - step.logp) - 1).abs().max() <= 1e-6
        assert (new.kl > 0).all() and torch.isfinite(new.kl).all()
        new.logp.sum().backward()
    grads = [p.grad for _, p in adapter.trainable() if p.grad is not None]
    assert grads and all(torch.isfinite(g).all() for g in grads)
    assert any(g.abs().max() > 0 for g in grads)


@every
def test_cached_embeddings_are_the_encoded_ones(case, tmp_path):
    path = folder(case.family)
    adapter = load(case, path)
    first = Embeddings(adapter, case.max_length, tmp_path)
    sources = [case.images(0, SIZES[0]), case.images(1, SIZES[0])] if case.edit else None
    fresh = first([*PROMPTS, PROMPTS[0]], sources and [*sources, sources[0]])
    assert first.encoded >= len(PROMPTS)
    assert fresh[0] is fresh[2]

    blind = load(case, path, encoders=False)
    again = Embeddings(blind, case.max_length, tmp_path)
    cached = again([*reversed(PROMPTS)], sources and [*reversed(sources)])[::-1]
    assert again.encoded == 0
    for a, b in zip(fresh[:2], cached, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)
    with pytest.raises(ModelError, match="text encoders were left on disk"):
        again(["a prompt that nobody encoded"])
    for other in (Embeddings(load(case, path, torch.bfloat16), case.max_length, tmp_path),):
        assert other.key(PROMPTS[0]) != first.key(PROMPTS[0]), "another dtype is another embedding"


@every
def test_a_size_that_does_not_fit_is_refused(case):
    adapter = load(case, folder(case.family))
    with pytest.raises(ValueError, match="multiples of"):
        adapter.latent_shape(33, 32)


@every
def test_the_stock_call_is_named(case):
    """Exports and proofs rely on it; the oracles above use the hand-written one."""
    adapter = load(case, folder(case.family))
    assert adapter.stock_call(PROMPTS, case.max_length) == case.call | {"prompt": PROMPTS}
    if case.edit:
        assert adapter.stock_edit(*SIZES[1]) == (case.stock or adapter.pipeline, case.edit(*SIZES[1]))

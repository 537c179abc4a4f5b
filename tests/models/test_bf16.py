"""bf16 as in the stock pipelines: the denoiser runs in its own dtypes, without autocast, and trains in fp32 masters.

Why these cases: which inputs are cast, and when (timesteps, guidance, latents, masks), and which modules stay in fp32
(Wan's time embedder) differ by family, and a wrong dtype changes results by more than a step of training. The oracle is
the stock pipeline's own denoiser, its inputs and outputs recorded during a stock run.
"""

from contextlib import contextmanager

import pytest
import torch
from world import (  # fmt: skip
    CASES,
    SIZES,
    TWO_PROMPTS,
    case_of,
    conditions,
    folder,
    initial_noise,
    load,
    opened,
    stock_image,
    tiered,
)
from world import stock_pipe as pipe_of

from prefgrpo.config.loading import from_dict
from prefgrpo.models import MODELS, family
from prefgrpo.parallel.shard import full_tensor
from prefgrpo.parallel.world import join, leave
from prefgrpo.rollout.rollout import rollout
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.update.trajectory import replay

pytestmark = [pytest.mark.families, pytest.mark.usefixtures("few_source_tokens")]
BF16 = torch.bfloat16
SIZE, STEPS = SIZES[1], 4
ONE = TWO_PROMPTS[1:]
"""One prompt per call: text encoders round batches in bf16 otherwise than single prompts."""


def stock_pipe(case):
    """The stock pipeline in bf16 (of Wan the VAE and image encoder in fp32), its parameters copied to aligned
    addresses, at which products round equally."""
    kind = case.stock or family(case.family).pipeline
    dtypes = {"default": BF16} | (
        {"vae": torch.float32, "image_encoder": torch.float32} if "wan" in case.family else {}
    )
    pipe = pipe_of(kind, folder(case.family), dtype=dtypes)
    for module in (part for part in pipe.components.values() if isinstance(part, torch.nn.Module)):
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.data = tensor.data.clone()
    return pipe


def stock_calls(adapter, pipe, case):
    """(denoiser, arguments by name, output) of every forward of a stock run from our initial latents."""
    calls = []

    def note(module, args, kwargs, out):
        calls.append((module, dict(zip(("x", "t", "cap_feats"), args, strict=False)) | kwargs, out))

    hooks = [
        getattr(pipe, name).register_forward_hook(note, with_kwargs=True) for name in family(case.family).denoisers
    ]
    stock_image(pipe, case, initial_noise(adapter, case.sampling(SIZE, STEPS), 1), SIZE, STEPS, ONE)
    for hook in hooks:
        hook.remove()
    return calls


def own_layout(adapter, sampling, state, sound=None):
    """A stock denoiser's input or output, for one sample, in the layout of our latents."""
    shape = adapter.latent_shape(sampling)
    if isinstance(state, list):  # Z-Image
        return torch.stack(state).squeeze(2)
    if adapter.pipeline.startswith(("Flux2", "Flux3")):
        count = shape[1] * shape[2]
        return state[:, :count].transpose(1, 2).reshape(len(state), *shape)
    if sound is not None:
        return torch.cat([state, sound], dim=1)
    return state[:, -shape[0] :] if adapter.pipeline == "QwenImage21Pipeline" else state[:, : shape[0]]


def latents_of(adapter, sampling, call):
    return own_layout(adapter, sampling, call.get("x", call.get("hidden_states")), call.get("audio_hidden_states"))


def velocity_of(adapter, sampling, out):
    v = own_layout(adapter, sampling, out[0], out[1] if adapter.pipeline == "LTX2Pipeline" else None)
    return -v.float() if adapter.pipeline == "ZImagePipeline" else v


def without_padding(call):
    """The stock pipelines of HunyuanVideo and Krea-2 pad texts (and 1.5 an absent image) with masked tokens, before the
    end of Krea-2's, which ours leave out."""
    call = dict(call)
    for states, mask in (
        ("encoder_hidden_states", "encoder_attention_mask"),
        ("encoder_hidden_states_2", "encoder_attention_mask_2"),
    ):
        if mask in call:
            seen = call[mask][0].bool()
            for name in (states, mask):
                call[name] = call[name][:, seen]
            if "position_ids" in call:
                call["position_ids"] = call["position_ids"][int((~seen).sum()) :]
    if "image_embeds" in call:
        call["image_embeds"] = call["image_embeds"][:, :0]
    return call


@pytest.mark.parametrize("case", tiered(CASES))
def test_the_velocity_is_the_stock_denoisers_bit_for_bit(case):
    """At the latents of each step of a stock run, from our schedule and conditions."""
    case = case.unguided()
    adapter = load(case, dtype=BF16)
    pipe = stock_pipe(case)
    sampling = case.sampling(SIZE, STEPS)
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            own = dict(adapter.pipe.components[name].named_parameters())
            assert all(own[key].dtype == p.dtype for key, p in part.named_parameters()), name
    condition = conditions(adapter, case, ONE, SIZE)
    ode = make_schedule(adapter.sigmas(sampling), "ode", 0.0, times=adapter.times(sampling))
    calls = stock_calls(adapter, pipe, case)
    assert len(calls) == STEPS
    for k, (denoiser, call, out) in enumerate(calls):
        if case.family.startswith(("hunyuan_video", "krea2")):
            with torch.no_grad():
                out = denoiser(**without_padding(call))
        x = latents_of(adapter, sampling, call)
        want = velocity_of(adapter, sampling, out)
        with torch.no_grad():
            got = adapter.velocity(x.float(), ode.times[k].expand(1), condition, sampling)
        if case.stock:  # a given first frame has velocity 0
            got, want = got[:, :, 1:], want[:, :, 1:]
        assert got.isfinite().all() and torch.equal(got.to(want.dtype), want), f"step {k}"


@pytest.mark.parametrize("case", tiered([case_of(name) for name in ("qwen_image", "flux2_klein", "wan", "wan22")]))
def test_both_halves_of_a_guidance_pair_are_the_stock_denoisers(case):
    """For families whose stock pipeline makes two calls per step, as we do with guidance_gradient conditional."""
    adapter = load(case, dtype=BF16, guidance_gradient="conditional")
    sampling = case.sampling(SIZE, STEPS)
    condition = conditions(adapter, case, ONE, SIZE)
    ode = make_schedule(adapter.sigmas(sampling), "ode", 0.0, times=adapter.times(sampling))
    calls = stock_calls(adapter, stock_pipe(case), case)
    assert len(calls) == 2 * STEPS
    for k in range(STEPS):
        (_, call, cond), (_, _, uncond) = calls[2 * k : 2 * k + 2]
        x = latents_of(adapter, sampling, call).float()
        with torch.no_grad():
            c, u = adapter.predictions(x, ode.times[k].expand(1), condition, sampling)
        for got, out in ((c, cond), (u, uncond)):
            assert torch.equal(got, velocity_of(adapter, sampling, out)), f"step {k}"


# ---- full fine-tuning -----------------------------------------------------------------------------------------------


@contextmanager
def full_run(case, dtype="bf16"):
    """(adapter, world) of full fine-tuning in a single process."""
    values = {"model": str(folder(case.family)), "family": case.family, "dtype": dtype, "train": {"lora_rank": 0}}
    height, width = SIZE
    config = from_dict(values | {"data": {"prompts": "p.txt"}, "rollout": {"height": height, "width": width}})
    world = join(config)
    yield opened(config, world), world
    leave()


@pytest.mark.parametrize("case", tiered([case_of(name) for name in MODELS]))
def test_masters_in_fp32_compute_as_the_bf16_model(case):
    """The velocity is that of the bf16 model and the first ratio 1; the gradient is autograd's through that model.

    Gradients are equal bit for bit, except those of embedders that all blocks read: autograd sums what the blocks send
    back in bf16, and FSDP2's hooks change the order.
    """
    stock = load(case, dtype=BF16)
    sampling = case.sampling(SIZE)
    condition = conditions(stock, case, size=SIZE)
    schedule = make_schedule(stock.sigmas(sampling), "flow", 0.7, (0, 1, 2))
    done = rollout(stock, schedule, condition, torch.arange(2), sampling, seed=1)
    for module in stock.modules().values():
        module.requires_grad_(True)
    with full_run(case) as (adapter, world):
        assert world.layout.fsdp and {p.dtype for _, p in adapter.trainable()} == {torch.float32}
        own = rollout(adapter, schedule, condition, torch.arange(2), sampling, seed=1)
        assert torch.equal(own.latents, done.latents)
        for step in own.transitions:
            new = replay(adapter, schedule, condition, step, sampling)
            assert torch.equal(new.logp, step.logp), "the first ratio is 1"
            new.logp.sum().backward()
        world.sum_gradients([p for _, p in adapter.trainable()])
        got = {name: full_tensor(p.grad) for name, p in adapter.trainable() if p.grad is not None}
    want = {}
    for step in done.transitions:  # one backward at a time: each rounds to bf16, and the sum is kept in fp32
        replay(stock, schedule, condition, step, sampling).logp.sum().backward()
        for name, p in stock.trainable():
            if p.grad is not None:
                want[name] = want.get(name, 0.0) + p.grad.float()
            p.grad = None
    assert got.keys() == want.keys()
    inside = {
        id(p) for module in stock.modules().values() for block in stock.blocks(module) for p in block.parameters()
    }
    blocks = {name for name, p in stock.trainable() if id(p) in inside} & got.keys()
    assert blocks and blocks < got.keys()
    for name, gradient in got.items():
        exact = want[name]
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, exact) or (
            name not in blocks and (gradient - exact).norm() <= 0.05 * exact.norm()
        ), name


def test_fp32_needs_no_masters_and_no_process_group():
    with full_run(case_of("flux"), "fp32") as (adapter, world):
        assert world.mesh is None and not torch.distributed.is_initialized()
        assert type(adapter.transformer).__name__ == "FluxTransformer2DModel"

"""Attention backends: a run refuses faulty ones; faults are injected.

Why these cases: a backend that drops or wrongly scales a gradient trains without any error. So each kind of fault is
injected into a backend, and the start of a run must detect it; a correct backend must give the
same results on the run's own model.
"""

import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch.nn.attention import (
    SDPBackend,
    _fa4,
    _registry,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from world import ALONE, SIZES, case_of, conditions, folder, initial_noise, load, opened

from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.models import MODELS
from prefgrpo.models import attention as kernels
from prefgrpo.models.attention import FLASH, LIMIT, Case, attention_of_a_run, check_kernels, kernel_errors
from prefgrpo.parallel.attention_backend import backend, cases, set_backend
from prefgrpo.parallel.world import Layout
from prefgrpo.run.opening import Weights

CPU = torch.device("cpu")
CASE = Case(batch=2, queries=24, keys=24, heads=2, width=16)
NAME = "_native_math"
BACKEND = AttentionBackendName(NAME)


FAULTS = {
    "gradient of k dropped": lambda q, k, v: (q, k.detach(), v),
    "all gradients dropped": lambda q, k, v: (q.detach(), k.detach(), v.detach()),
    "gradient doubled": lambda q, k, v: (q, k, 2 * v - v.detach()),
    "no scale": lambda q, k, v: (4 * q, k, v),
    "not finite": lambda q, k, v: (q, k, v / 0),
}


@pytest.fixture
def inject(monkeypatch):
    def put(change):
        real = _AttentionBackendRegistry._backends[BACKEND]
        names = _AttentionBackendRegistry._supported_arg_names[BACKEND]

        def faulty(query, key, value, **rest):
            query, key, value = change(query, key, value)
            return real(query, key, value, **{k: v for k, v in rest.items() if k in names})

        monkeypatch.setitem(_AttentionBackendRegistry._backends, BACKEND, faulty)

    return put


@pytest.mark.parametrize("masked", [False, True])
def test_right_backends_pass(masked):
    for name in ("native", NAME):
        for case in (CASE._replace(masked=masked), Case(1, 40, 7, 3, 8, masked), Case(1, 5, 40, 1, 8, masked)):
            assert max(kernel_errors(name, case, torch.float32, CPU)) < 1e-5, (name, case)
            assert max(kernel_errors(name, case, torch.bfloat16, CPU)) < 2e-2, (name, case)


def test_the_exact_attention_is_that_of_torch_in_fp64(monkeypatch):
    """In chunks that end within the queries, masked and not, with cross-attention."""
    monkeypatch.setattr(kernels, "CHUNK", 64)
    generator = torch.Generator().manual_seed(1)
    q, upstream = (torch.randn(23, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(9, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    for mask in (None, torch.arange(9) < 6):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        shown = None if mask is None else mask[None]
        want = torch.nn.functional.scaled_dot_product_attention(*(x[None, None] for x in leaves), attn_mask=shown)[0, 0]
        want.backward(upstream)
        got = kernels._exact(q, k, v, upstream, mask)
        for x, y in zip(got, [want, *(leaf.grad for leaf in leaves)], strict=True):
            assert (x - y).abs().max() < 1e-12


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(inject, fault):
    inject(FAULTS[fault])
    output, gradient = kernel_errors(NAME, CASE, torch.float32, CPU)
    assert gradient > LIMIT[torch.float32]
    assert (output > LIMIT[torch.float32]) == (fault in ("no scale", "not finite"))


class WrongGradient(torch.autograd.Function):
    """The identity, whose gradient is NaN where `wrong` says so."""

    @staticmethod
    def forward(ctx, x, wrong):
        ctx.wrong = wrong
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, torch.nan) if ctx.wrong(gradient) else gradient, None


LATENT = 128
"""Tokens of `config`'s rollout, 32 × 64 pixels."""
TEXT = 24
"""Tokens of its texts."""
ONE_SIDED = {
    "a slice of a wider tensor": lambda q, k, v, gradient: not gradient.is_contiguous(),
    "a sum of two slices": lambda q, k, v, gradient: gradient.is_contiguous(),
    "rollout's tokens": lambda q, k, v, gradient: q.shape[1] == LATENT + TEXT,
    "evaluation's tokens": lambda q, k, v, gradient: q.shape[1] == 2 * LATENT + TEXT,
    "sliced inputs": lambda q, k, v, gradient: not v.is_contiguous(),
    "tokens first": lambda q, k, v, gradient: v.stride(1) > v.stride(0),
    "the last head alone": lambda q, k, v, gradient: q.shape[2] > 1 and bool(gradient[0, 0, -1].any()),
    "no fault": lambda q, k, v, gradient: False,
}
"""When the gradient is NaN. Only the check at 256 tokens with plain tensors, as it was, saw none of these."""


@pytest.mark.parametrize("fault", ONE_SIDED)
def test_a_fault_of_one_layout_or_size_is_seen_also_in_native(monkeypatch, fault):
    """On a device that is not a CPU, `native` is checked too; here the device is only called so."""
    real = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]

    def faulty(query, key, value, attn_mask=None, **_):
        out = real(query, key, value, attn_mask=attn_mask)
        return WrongGradient.apply(out, lambda gradient: ONE_SIDED[fault](query, key, value, gradient))

    monkeypatch.setitem(_AttentionBackendRegistry._backends, AttentionBackendName.NATIVE, faulty)
    settings = config(rollout={"height": 32, "width": 64, "batch_size": 2}, eval={"height": 64, "width": 64})
    adapter = opened(settings)  # on a CPU without a check
    on_cpu = mock.patch(
        "prefgrpo.parallel.attention_backend.check_kernels",
        lambda name, case, dtype, _, given: check_kernels(name, case, dtype, CPU, given),
    )
    with on_cpu:
        if fault == "no fault":
            set_backend(adapter, settings, Layout(), torch.device("cuda"))
        else:
            with pytest.raises(ConfigError, match=r"attention: native is wrong on batch 2, .* gradients by inf"):
                set_backend(adapter, settings, Layout(), torch.device("cuda"))


OTHER_TOKENS = (
    "flux_kontext", "qwen_image_edit", "qwen_image_edit_plus",  # source images, of any size
    "qwen_image_21", "hunyuan_video_15",  # blocks choose their kernels; texts of two encoders and image tokens
    "wan_i2v",  # text after image tokens, in a call of its own
)  # fmt: skip


@pytest.mark.parametrize("family", [name for name in MODELS if name not in OTHER_TOKENS])
def test_what_is_checked_is_what_the_blocks_compute(family):
    """Tokens of latents and text, heads and their width, in the calls of a forward that reach torch."""
    case = case_of(family).unguided()
    adapter = load(case)
    adapter.dispatch_attention()
    sampling = case.sampling(SIZES[1])
    condition = conditions(adapter, case, size=SIZES[1])
    longest = case.max_length if adapter.attention_masks == "none" else condition.prompt_embeds.shape[1]
    values = {
        "rollout": {"height": sampling.height, "width": sampling.width, "batch_size": 2, "frames": sampling.frames}
    }
    run = config(data={"prompts": "p.txt", "max_length": longest}, **values)
    real = torch.nn.functional.scaled_dot_product_attention
    calls = set()

    def noted(query, key, value, **rest):
        calls.add(Case(len(query), query.shape[2], key.shape[2], query.shape[1], query.shape[3]))
        return real(query, key, value, **rest)

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", noted), torch.no_grad():
        adapter.velocity(initial_noise(adapter, sampling, 2), torch.tensor([0.5, 0.5]), condition, sampling)
    expected = cases(adapter, run, "_native_flash", Layout())
    assert expected and set(expected) <= calls, (expected, calls)


def test_cudnn_is_forbidden_until_the_last_run_ends():
    """In every thread; runs may end in any order, and by any exception."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled
    before = allowed()
    for start in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(start)
        one = ExitStack()
        other = ExitStack()
        for stack in (one, other):
            stack.enter_context(attention_of_a_run())
            with ThreadPoolExecutor(1) as pool:
                assert not allowed() and not pool.submit(allowed).result()
        one.close()
        assert not allowed()
        with pytest.raises(KeyboardInterrupt), other:
            raise KeyboardInterrupt
        assert allowed() is start
    torch.backends.cuda.enable_cudnn_sdp(before)


BACKENDS = [
    # attention, device, dtype, masks, what runs
    ("native", "cuda", torch.bfloat16, False, "_native_flash"),
    ("native", "cuda", torch.bfloat16, True, "native"),
    ("native", "cuda", torch.float32, False, "native"),
    ("native", "cpu", torch.bfloat16, False, "native"),
    ("fa3", "cuda", torch.bfloat16, False, "_native_flash"),
    ("fa4", "cuda", torch.bfloat16, False, "_native_flash"),
    ("_native_math", "cuda", torch.bfloat16, True, "_native_math"),
    ("_flash_3_hub", "cuda", torch.bfloat16, False, "_flash_3_hub"),
]  # fmt: skip


@pytest.mark.parametrize("name, device, dtype, masks, want", BACKENDS)
def test_one_named_backend_for_device_dtype_and_masks(name, device, dtype, masks, want):
    assert backend(name, torch.device(device), dtype, masks) == want


def test_the_default_on_a_gpu_is_flash_attention_unless_blocks_mask():
    """diffusers' native under Ulysses computes every forward again in the backward pass."""
    flash = AttentionBackendName._NATIVE_FLASH
    native = AttentionBackendName.NATIVE
    table = [
        ("flux", "cuda", Layout(ulysses=2), flash), ("flux", "cuda", Layout(), flash),
        ("flux", "cpu", Layout(ulysses=2), native), ("qwen_image", "cuda", Layout(ulysses=2), native),
        ("qwen_image", "cuda", Layout(), flash),
    ]  # fmt: skip
    for family, device, layout, want in table:
        adapter = load(case_of(family), encoders=False)
        adapter.dtype = torch.bfloat16
        with mock.patch("prefgrpo.parallel.attention_backend.check_kernels") as checked:
            set_backend(adapter, config(dtype="bf16"), layout, torch.device(device))
        assert {block.attn.processor._attention_backend for block in adapter.blocks(adapter.transformer)} == {want}
        assert {call.args[0] for call in checked.call_args_list} == ({want.value} if device == "cuda" else set())


# ---- FlashAttention-3 and 4 in torch's FlashAttention op
GPU = torch.device("cuda")


class Kernels:
    """Stands for a package of kernels: registered in torch, it replaces FlashAttention's op on the CPU while active."""

    def __init__(self, change=lambda q, k, v: (q, k, v)):
        self.change = change
        self.events = []
        self.calls = 0
        self.library = None

    def register(self):
        self.events.append("activated")
        self.library = torch.library.Library("aten", "IMPL", "AutogradCPU")
        self.library.impl("_scaled_dot_product_flash_attention_for_cpu", self.forward)
        return self

    def remove(self):
        self.events.append("restored")
        self.library._destroy()

    def forward(self, q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        self.calls += 1
        q, k, v = self.change(q, k, v)
        out = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        return out, out.new_zeros(out.shape[:-1], dtype=torch.float32)


@pytest.fixture
def in_torch(monkeypatch):
    """Register kernels as torch's FA4; checks of the device that is called a GPU run on the CPU."""

    def put(kernels, name="FA4"):
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, kernels.register)
        return kernels

    def on_cpu(name, case, dtype, _, given=""):
        check_kernels(name, case, dtype, CPU, given)

    monkeypatch.setattr("prefgrpo.parallel.attention_backend.check_kernels", on_cpu)
    yield put
    assert current_flash_attention_impl() is None and not kernels._runs


def start(attention, **more):
    """Set the backend of a new adapter as on a GPU, in bf16."""
    values = {"dtype": "bf16", "rollout": {"height": 32, "width": 32, "batch_size": 2}} | more
    adapter = load(case_of("flux"), dtype=torch.bfloat16, encoders=False)
    set_backend(adapter, config(attention, **values), Layout(), GPU)
    return {block.attn.processor._attention_backend.value for block in adapter.blocks(adapter.transformer)}


@pytest.mark.parametrize("name", FLASH)
def test_other_flash_kernels_run_in_torchs_op_until_the_run_ends(in_torch, name):
    """They are active when the start checks them, in every thread, and gone after the run."""
    fake = in_torch(Kernels(), FLASH[name])
    q = torch.randn(1, 2, 8, 8, dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    with attention_of_a_run():
        assert start(name) == {"_native_flash"}
        assert current_flash_attention_impl() == FLASH[name]
        assert fake.calls >= 2, "the check of two layouts"
        before = fake.calls
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), ThreadPoolExecutor(1) as pool:
            attend(q, q, q)
            pool.submit(attend, q, q, q).result()
        assert fake.calls == before + 2 and fake.events == ["activated"]
        assert start(name) == {"_native_flash"} and fake.events == ["activated"], "a second model, as in evaluate"
    assert fake.events == ["activated", "restored"]
    before = fake.calls
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attend(q, q, q)
    assert fake.calls == before


def test_a_denoiser_forbids_no_kernel_to_other_threads(in_torch):
    """A reward's attention in fp32 on the scorer's thread, while a block is in FlashAttention."""
    seen = []

    class Watched(Kernels):
        def forward(self, *args, **kwargs):
            allowed = (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled)
            with ThreadPoolExecutor(1) as pool:
                seen.extend(pool.submit(ask).result() for ask in allowed)
            return super().forward(*args, **kwargs)

    fake = in_torch(Watched(), "FA4")
    with attention_of_a_run():
        assert start("fa4") == {"_native_flash"} and fake.calls >= 2
    assert seen and all(seen)


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_flash_kernels_end_the_start_and_are_restored(in_torch, fault):
    fake = in_torch(Kernels(FAULTS[fault]))
    wrong = r"attention: fa4 is wrong on batch 2, .*; expected another backend"
    with pytest.raises(ConfigError, match=wrong), attention_of_a_run():
        start("fa4")
    assert fake.events == ["activated", "restored"]


def test_kernels_that_fail_name_the_package(in_torch):
    """FlashAttention-4 refuses sizes by assertions; a later one returns too many values (pytorch#190212)."""

    def refuse(q, k, v):
        raise AssertionError("head_dim must be between 8 and 256")

    in_torch(Kernels(refuse))
    with pytest.raises(ConfigError) as caught, attention_of_a_run():
        start("fa4")
    (message,) = caught.value.mistakes
    assert message.startswith(
        "attention: fa4 does not run here: head_dim must be between 8 and 256; expected flash-attn-4"
    )


@pytest.mark.parametrize("name, package", [("fa3", "flash_attn_3"), ("fa4", "pip install -e '.[fa4]'")])
def test_a_missing_package_is_named(name, package):
    """By torch's own registration, which imports the package."""
    with pytest.raises(ConfigError) as caught, attention_of_a_run():
        start(name)
    (message,) = caught.value.mistakes
    assert message.startswith(f"attention: {name} does not run here: No module named 'flash_attn")
    assert package in message
    assert current_flash_attention_impl() is None


def test_they_are_for_gpus():
    with pytest.raises(ConfigError, match="attention: fa4 is for GPUs, expected native on a cpu"):
        opened(config("fa4", dtype="bf16"))


def test_an_open_run_keeps_its_kernels(in_torch):
    """Runs of one process share the op: a second one does not change what the first computes."""
    fake = in_torch(Kernels())
    in_torch(Kernels(), "FA3")
    first = ExitStack()
    second = ExitStack()
    first.enter_context(attention_of_a_run())
    start("fa4")
    second.enter_context(attention_of_a_run())
    start("fa4")
    for other in ("native", "fa3"):
        with pytest.raises(ConfigError, match=f"attention: an open run uses FA4, .* close it before {other} starts"):
            start(other)
    first.close()
    assert current_flash_attention_impl() == "FA4", "the second run still computes with it"
    with pytest.raises(KeyboardInterrupt), second:
        raise KeyboardInterrupt
    assert fake.events == ["activated", "restored"]


def test_what_was_active_before_comes_back(in_torch):
    mine = in_torch(Kernels(), "FA3")
    theirs = in_torch(Kernels())
    activate_flash_attention_impl("FA3")
    try:
        with attention_of_a_run():
            start("native")
            assert current_flash_attention_impl() == "FA3", "native is torch's own choice, whatever it is"
            start("fa4")
            assert current_flash_attention_impl() == "FA4"
        assert current_flash_attention_impl() == "FA3"
    finally:
        restore_flash_attention_impl()
    assert mine.events == ["activated", "restored"] * 2 and theirs.events == ["activated", "restored"]


def test_torch_calls_the_package_that_is_pinned(monkeypatch, root):
    """flash-attn-4 4.0.0b18 returns two values from its forward and three from its backward."""
    assert 'fa4 = ["flash-attn-4==4.0.0b18", ' in (root / "pyproject.toml").read_text(encoding="utf-8")
    t = torch.zeros(1, 4, 2, 8)
    package = SimpleNamespace(
        _flash_attn_fwd=lambda q, k, v, **_: (q + 1, t[..., 0]),
        _flash_attn_bwd=lambda q, k, v, out, dout, lse, **_: (q + 1, q + 2, q + 3),
    )
    monkeypatch.setattr(_fa4, "_FA4_MODULE_PATH", "flash_attn.cute.interface")
    monkeypatch.setattr(_fa4, "_fa4_import_module", lambda path: package)
    for function, given in ((_fa4._fa4_run_forward, (t, t, t)), (_fa4._fa4_run_backward, (t,) * 6)):
        names = list(inspect.signature(function).parameters)[len(given) :]
        out = function(*given, **dict.fromkeys(names))
        assert float(out[0].max()) == 1


def test_every_torch_that_is_allowed_has_the_function(root):
    """torch 2.11 to 2.14.1 have it with FA3 and FA4, and a way back; 2.10 has FA4 alone, without one."""
    assert 'dependencies = ["torch>=2.11", ' in (root / "pyproject.toml").read_text(encoding="utf-8")
    assert {"FA3", "FA4"} <= set(list_flash_attention_impls())


def config(attention="native", **more):
    values = {"model": str(folder("flux")), "dtype": "fp32", "data": {"prompts": "p.txt", "max_length": 24}}
    sizes = {"rollout": {"height": 32, "width": 32, "batch_size": 2}, "train": {"lora_rank": 2, "lora_alpha": 2}}
    return from_dict(values | sizes | {"attention": attention} | more)


def test_a_run_uses_it_everywhere_or_does_not_start(inject):
    case, out = case_of("flux"), {}
    for name in ("native", NAME):
        adapter = opened(config(name))
        x = torch.randn(2, *adapter.latent_shape(config().rollout), generator=torch.Generator().manual_seed(0))
        condition = conditions(adapter, case)
        out[name] = adapter.velocity(x, torch.full((2,), 0.5), condition, config().rollout)
        used = {block.attn.processor._attention_backend for block in adapter.blocks(adapter.transformer)}
        assert used == {AttentionBackendName(name)}
    assert torch.allclose(out["native"], out[NAME], atol=1e-5)
    inject(FAULTS["gradient of k dropped"])
    with pytest.raises(ConfigError, match=r"attention: _native_math is wrong on .* gradients by 100\.0%"):
        opened(config(NAME))


def test_a_base_model_generates_with_it_too():
    """`generate` and `evaluate` of a model that is not trained had diffusers' default whatever was chosen."""
    adapter = Weights(config(NAME)).open(ALONE, encoders=False)
    assert {b.attn.processor._attention_backend for b in adapter.blocks(adapter.transformer)} == {BACKEND}
    with pytest.raises(ConfigError, match="attention: fa4 is for GPUs"):
        Weights(config("fa4", dtype="bf16")).open(ALONE, encoders=False)


def test_a_backend_that_does_not_run_here():
    with pytest.raises(ConfigError, match=r"attention: _flash_3_hub does not run here: "):
        opened(config("_flash_3_hub", dtype="bf16"))


def test_a_run_leaves_no_backend_behind():
    """diffusers has one active backend per process, for modules without their own: an estimate, a VAE, the next run."""
    before = _AttentionBackendRegistry.get_active_backend()[0]
    opened(config(NAME))
    assert _AttentionBackendRegistry.get_active_backend()[0] == before != BACKEND

"""Every family under every backend of attention, alone and under context parallelism.

Why these cases: the kernels of GPUs refuse dtypes, masks, wide heads and strides that torch takes. Stand-ins under
their names in diffusers refuse what each kernel refuses and compute with torch, forward and backward. So the tests show
what reaches a kernel, not that the kernel is right; the gradients of a run must be those of torch's own attention.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import ops_cases
import pytest
import torch
from diffusers.models import attention_dispatch as dispatch
from ranks import all_end, ranks
from world import ALONE, SIZES, case_of, conditions, folder, opened, perturb, small_sources, tiered

from prefgrpo.config.loading import from_dict
from prefgrpo.config.schema import Attention
from prefgrpo.models import MODELS
from prefgrpo.models import family as model_family
from prefgrpo.models.attention import FLASH
from prefgrpo.parallel.attention_backend import SPLITTING, backends, cases, set_backend
from prefgrpo.parallel.world import Layout, join
from prefgrpo.rollout.rollout import rollout
from prefgrpo.run.errors import option_errors
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.update.trajectory import replay

# ---- stand-ins for the kernels --------------------------------------------------------------------------------------

VARLEN = ("_flash_3_varlen_hub",)
UNMASKED = ("_flash_3_hub", "_native_flash")
NAMES = [name for name in get_args(Attention) if name not in ("native", "_native_math", *FLASH)]
CALLS: Counter[str] = Counter()
"""Calls per backend, forward and backward apart (`name`, `name backward`)."""


def check(name, *tensors):
    """Raise what a kernel raises for tensors that it does not take."""
    dtypes = {t.dtype for t in tensors}
    if not dtypes <= {torch.bfloat16, torch.float16}:
        raise RuntimeError(f"{name} only supports fp16 and bf16 data types, got {dtypes}")
    if len(dtypes) > 1:
        raise RuntimeError(f"{name}: query, key and value must have the same dtype, got {dtypes}")
    if any(t.shape[-1] > 256 for t in tensors) or any(t.stride(-1) != 1 for t in tensors):
        raise RuntimeError(f"{name}: heads of at most 256 contiguous elements")
    CALLS[name] += 1


def key_mask(name, mask, batch, keys):
    """The mask as the kernel understands it, [B, 1, 1, N] or None."""
    if mask is None:
        return None
    if name in UNMASKED:
        raise ValueError(f"`attn_mask` is not supported for {name}")
    return dispatch._normalize_attn_mask(mask, batch, keys)[:, None, None, :] if name in VARLEN else mask


def attend(query, key, value, mask, scale):
    q, k, v = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.permute(0, 2, 1, 3)


def split_forward(name, ctx, query, key, value, attn_mask, _p, _causal, scale, _gqa, return_lse, _save_ctx=True, **_):
    """The forward of one process's heads or keys, with what the kernel's backward needs in `ctx`."""
    check(name, query, key, value)
    mask = key_mask(name, attn_mask, len(query), key.shape[1])
    out, lse = ops_cases.attend(*(x.transpose(1, 2) for x in (query, key, value)), scale, mask)
    out = out.transpose(1, 2).contiguous()
    lse = lse.transpose(1, 2).contiguous()
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale = scale
        ctx.mask = mask
    return (out, lse) if return_lse else out


def split_backward(name, ctx, grad, *_, query=None, key=None, value=None, out=None, lse=None, **__):
    """Its backward, for the saved keys or others of the ring, with the log-sum-exp over all keys."""
    given = (query, key, value, out, lse)
    query, key, value, out, lse = (b if a is None else a for a, b in zip(given, ctx.saved_tensors, strict=True))
    check(f"{name} backward", query, key, value, grad)
    inputs = [x.transpose(1, 2) for x in (grad, query, key, value, out, lse)]
    return tuple(x.transpose(1, 2) for x in ops_cases.gradients(*inputs, ctx.scale, ctx.mask))


def kernel(name):
    def backend(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
        return_lse=False, _parallel_config=None,
    ):  # fmt: skip
        if _parallel_config is not None:
            return dispatch._templated_context_parallel_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
                forward_op=partial(split_forward, name), backward_op=partial(split_backward, name),
                _parallel_config=_parallel_config,
            )  # fmt: skip
        check(name, query, key, value)
        return attend(query, key, value, key_mask(name, attn_mask, len(query), key.shape[1]), scale)

    backend.leaves_kernels_allowed = True  # so that a run does not call torch's attention in its place
    return backend


@contextmanager
def stand_ins() -> Iterator[Counter[str]]:
    """Context in which the kernels exist; yields the calls so far."""
    registry = dispatch._AttentionBackendRegistry
    arguments = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "return_lse"}
    names = {dispatch.AttentionBackendName(name): name for name in NAMES}
    with (
        mock.patch.dict(registry._backends, {key: kernel(name) for key, name in names.items()}),
        mock.patch.dict(registry._supported_arg_names, {key: arguments | {"_parallel_config"} for key in names}),
        mock.patch.object(dispatch, "_check_attention_backend_requirements", lambda backend: None),
        mock.patch.object(dispatch, "_maybe_download_kernel_for_backend", lambda backend: None),
    ):
        CALLS.clear()
        yield CALLS


# ---- every family ---------------------------------------------------------------------------------------------------

REFUSING = ("qwen_image_21", "hunyuan_video_15")
"""Families that choose their kernels themselves, or always mask their text."""


def settings(case, attention, place, **more):
    values = {"model": f"{place}/{case.family}", "family": case.family, "dtype": "bf16", "attention": attention}
    values |= {"data": {"prompts": "p.txt", "max_length": case.max_length}, "train": {"lora_rank": 4, "lora_alpha": 8}}
    frames = {} if model_family(case.family).default_frames is None else {"frames": 5}  # CPUs sum long clips in bf16
    return from_dict(values | {"rollout": {"height": 32, "width": 64, "batch_size": 2, **frames}} | more)


def one_step(config, case, world):
    """The LoRA's gradients of one replayed step of two prompts, and the largest |ratio - 1|."""
    adapter = perturb(opened(config, world))
    sampling = case.sampling(SIZES[1])
    condition = conditions(adapter, case, size=SIZES[1])
    schedule = make_schedule(adapter.sigmas(sampling), "flow", 0.7, (1,))
    (step,) = rollout(adapter, schedule, condition, torch.tensor([5, 9]), sampling, seed=1).transitions
    new = replay(adapter, schedule, condition, step, sampling)
    (new.logp * torch.tensor([1.0, -0.5])).sum().backward()
    trainable = [p for _, p in adapter.trainable()]
    if world.size > 1:
        world.sum_gradients(trainable)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
    return torch.cat([g.flatten() for g in gradients]), float((new.logp - step.logp).detach().abs().max())


def trains_with(case, layout, world, place, want):
    """Check all backends of a family under a layout against the gradients of torch's own attention."""
    cls = model_family(case.family)
    family = case.family
    trained = backends(cls, layout)
    parallel = {"ring": layout.ring, "ulysses": layout.ulysses}
    with stand_ins() as calls:
        for name in NAMES:
            if layout.context > 1 and name not in SPLITTING:
                continue
            config = settings(case, name, place, parallel=parallel)
            if name not in trained:
                (text,) = option_errors(config)
                assert text.startswith(f"attention: {family} ") and text.endswith(f"got {name}"), text
                continue
            assert not option_errors(config)
            gradient, moved = one_step(config, case, world)
            assert moved == 0, (family, name, "the first ratio is not exactly 1")
            assert calls[name] > 0 and (layout.context == 1 or calls[f"{name} backward"] > 0), (family, name, calls)
            assert (gradient - want).norm() <= 0.1 * want.norm(), (family, name, layout)
    return trained


@pytest.mark.parametrize("case", tiered([case_of(name) for name in MODELS]))
def test_every_family_trains_with_its_backends(case, tmp_path):
    (tmp_path / case.family).symlink_to(folder(case.family))
    with small_sources():
        want, _ = one_step(settings(case, "native", tmp_path), case, ALONE)
        trained = trains_with(case, Layout(), ALONE, tmp_path, want)
    assert (set(trained) >= set(NAMES)) == (case.family not in REFUSING)


def test_a_run_without_text_encoders_says_nothing_that_alarms(tmp_path):
    """diffusers warns of attention backends, which are "experimental", and of parts that were not loaded."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    loggers = [logging.getLogger(f"diffusers.{name}") for name in ("pipelines.pipeline_utils", "models.modeling_utils")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        adapter = model_family("flux").load(str(folder("flux")), torch.float32, torch.device("cpu"), encoders=False)
        set_backend(adapter, settings(case_of("flux"), "native", "m"), Layout(), torch.device("cpu"))
        adapter.save_full(str(tmp_path))
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert (tmp_path / "text_encoder").is_dir() and said == []


def test_the_heads_of_a_denoiser_are_found_under_every_name_of_diffusers():
    """Width per head; hidden_size is Lumina2's."""
    for names in ({"num_attention_heads": 4, "attention_head_dim": 8}, {"n_heads": 4, "dim": 32},
                  {"num_attention_heads": 4, "hidden_size": 32}):  # fmt: skip
        denoiser = SimpleNamespace(config=names)
        adapter = SimpleNamespace(transformer=denoiser, attention_masks="none", attention_tokens=lambda *_: [(6, 6)])
        (found,) = cases(adapter, settings(case_of("flux"), "native", "m"), "native", Layout())
        assert (found.heads, found.width) == (4, 8)


SHORT = {"none": "no mask", "padding": "no mask on one GPU", "always": "masks text", "own": "own kernels"}


def support_table():
    """Family × (one GPU, Ulysses, ring) → backends, from the code's own table."""
    everything = get_args(Attention)

    def cell(cls, layout):
        names = backends(cls, layout)
        if len(names) == len(everything):
            return "all"
        return ", ".join(f"`{name}`" for name in names) or "refused"

    rows: dict[tuple[str, ...], list[str]] = {}
    for name in MODELS:
        cls = model_family(name)
        cells = [cell(cls, layout) for layout in (Layout(), Layout(ulysses=2), Layout(ring=2))]
        rows.setdefault((SHORT[cls.attention_masks], *cells), []).append(name)
    lines = ["| family | masks | one GPU | Ulysses | ring |", "|---|---|---|---|---|"]
    return lines + [f"| {', '.join(f'`{n}`' for n in names)} | {' | '.join(row)} |" for row, names in rows.items()]


def test_the_table_of_the_documentation_is_the_codes(root):
    text = (root / "docs" / "scale.md").read_text(encoding="utf-8")
    table = text.partition("<!-- attention: begin -->")[2].partition("<!-- attention: end -->")[0]
    assert table.split("\n")[1:-1] == support_table(), "\n".join(support_table())


def split_processes():
    """Runs in the new process: all backends of $FAMILY under Ulysses and, where supported, ring attention."""
    torch.set_num_threads(1)
    case = case_of(os.environ["FAMILY"])
    place = os.environ["PLACE"]
    cls = model_family(case.family)
    with small_sources():
        want, _ = one_step(settings(case, "native", place), case, ALONE)
        for layout in (Layout(ulysses=2), Layout(ring=2)):
            if trained := backends(cls, layout):
                parallel = {"ring": layout.ring, "ulysses": layout.ulysses}
                world = join(settings(case, trained[-1], place, parallel=parallel))
                trains_with(case, layout, world, place, want)
                if "native" in trained:
                    native, moved = one_step(settings(case, "native", place, parallel=parallel), case, world)
                    assert moved == 0 and (native - want).norm() <= 0.1 * want.norm()
    os._exit(0)


SPLIT = [case_of(name) for name in ("flux", "flux2_klein", "qwen_image", "wan_i2v")]
"""One family per class of blocks that can be split."""


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_every_class_of_blocks_trains_with_them_under_context_parallelism(case, tmp_path):
    (tmp_path / case.family).symlink_to(folder(case.family))
    runs = ranks(tmp_path / "run.yaml", 2, hook=split_processes, PLACE=str(tmp_path), FAMILY=case.family)
    all_end(runs, seconds=600)

"""Attention backends: a run refuses faulty ones; faults are injected.

Why these cases: a backend that drops or wrongly scales a gradient trains without any error. So each kind of fault is
injected into a backend, and the start of a run must detect it; a correct backend must give the
same results on the run's own model.
"""

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from families import case_of, conditions, folder
from tiny_run import ALONE

from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.parallel.attention import errors, problem
from prefgrpo.run.loading import open_adapter, trainable

CPU, SHAPE = torch.device("cpu"), (2, 24, 2, 16)
NAME = "_native_math"
BACKEND = AttentionBackendName(NAME)


FAULTS = {
    "gradient of k dropped": (lambda q, k, v: (q, k.detach(), v), "wrong gradients"),
    "all gradients dropped": (lambda q, k, v: (q.detach(), k.detach(), v.detach()), "wrong gradients"),
    "gradient doubled": (lambda q, k, v: (q, k, 2 * v - v.detach()), "wrong gradients"),
    "no scale": (lambda q, k, v: (4 * q, k, v), "wrong"),
    "not finite": (lambda q, k, v: (q, k, v / 0), "wrong"),
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
        assert max(errors(name, SHAPE, torch.float32, CPU, masked)) < 1e-5, name
        assert max(errors(name, SHAPE, torch.bfloat16, CPU, masked)) < 2e-2, name


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(inject, fault):
    change, text = FAULTS[fault]
    inject(change)
    assert text in problem(NAME, SHAPE, torch.float32, CPU, False)


def config(attention="native", **more):
    values = {"model": str(folder("flux")), "dtype": "fp32", "data": {"prompts": "p.txt", "max_length": 24}}
    sizes = {"rollout": {"height": 32, "width": 32, "batch_size": 2}, "train": {"lora_rank": 2, "lora_alpha": 2}}
    return from_dict(values | sizes | {"attention": attention} | more)


def test_a_run_uses_it_everywhere_or_does_not_start(inject):
    case, out = case_of("flux"), {}
    for name in ("native", NAME):
        adapter = trainable(config(name), open_adapter(config(name), CPU), ALONE)
        x = torch.randn(2, *adapter.latent_shape(config().rollout), generator=torch.Generator().manual_seed(0))
        condition = conditions(adapter, case)
        out[name] = adapter.velocity(x, torch.full((2,), 0.5), condition, config().rollout)
        used = {block.attn.processor._attention_backend for block in adapter.blocks(adapter.transformer)}
        assert used == {None if name == "native" else BACKEND}
    assert torch.allclose(out["native"], out[NAME], atol=1e-5)
    inject(FAULTS["gradient of k dropped"][0])
    with pytest.raises(ConfigError, match="attention: _native_math gives wrong gradients"):
        trainable(config(NAME), open_adapter(config(NAME), CPU), ALONE)


def test_backends_that_cannot_be():
    for attention, more, text in (
        ("flash", {}, "flash computes in bf16; expected dtype bf16, got fp32"),
        ("xformers", {"parallel": {"ulysses": 2}}, "under context parallelism, got xformers"),
        ("native", {"parallel": {"ring": 2}}, "ring attention needs log-sum-exps"),
        ("xformers", {}, None),
    ):
        if text is None:
            with pytest.raises(ConfigError, match=r"attention: xformers does not run here: .*xformers"):
                trainable(config(attention), open_adapter(config(attention), CPU), ALONE)
        else:
            with pytest.raises(ConfigError, match=text):
                config(attention, **more)

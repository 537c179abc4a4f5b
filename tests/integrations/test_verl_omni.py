"""Our functions in verl-omni's place: a loop of its scheduler, its registry of losses; needs its checkout in
PREFGRPO_PEERS. A step and its score, by number: tests/integrations/test_steps.py and test_stored.py.

Its packages' __init__ files import vLLM and Ray, so the two modules with its formulas are imported alone, with
stand-ins for the names that they only use in annotations.
"""

import sys
from types import ModuleType, SimpleNamespace

import peers
import pytest
import torch

from prefgrpo.integrations import verl_omni

CONFIG = SimpleNamespace(diffusion_loss=SimpleNamespace(clip_ratio=1e-4, adv_clip_max=5.0))


@pytest.fixture
def theirs(monkeypatch):
    """(scheduler module, module of losses and estimators)."""
    root = peers.folder("verl_omni") / "verl_omni"
    for name in ("verl_omni", "verl_omni.pipelines", "verl_omni.trainer", "verl_omni.workers"):
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    for name, names in {
        "omegaconf": ["DictConfig"], "tensordict": ["TensorDict"], "verl": ["DataProto"], "verl.utils": [],
        "verl.utils.tensordict_utils": [], "verl_omni.workers.config": ["DiffusionActorConfig"],
    }.items():  # fmt: skip
        module = ModuleType(name)
        vars(module).update(dict.fromkeys(names, object), tensordict_utils=None)
        monkeypatch.setitem(sys.modules, name, module)
    before = set(sys.modules)
    from verl_omni.pipelines.schedulers import flow_match_sde
    from verl_omni.trainer.diffusion import diffusion_algos

    yield flow_match_sde, diffusion_algos
    for name in set(sys.modules) - before:
        if name.startswith("verl_omni"):
            del sys.modules[name]


def near(ours, want, rtol=1e-6):
    """Equal within `rtol` of the largest value."""
    assert ours.dtype == want.dtype
    largest = float(want.abs().max().clamp_min(1e-30))
    torch.testing.assert_close(ours.double(), want.double(), rtol=0, atol=rtol * largest)


@pytest.fixture
def schedulers(theirs):
    """The peer's scheduler and ours."""
    cls = theirs[0].FlowMatchSDEDiscreteScheduler
    ours = type("Ours", (cls,), {"sample_previous_step": verl_omni.sample_previous_step})
    both = [cls(shift=3.0), ours(shift=3.0)]
    for one in both:
        one.set_timesteps(8)
    return both


def test_its_configuration_takes_the_names_of_our_losses():
    """Its closed list, read from the file: another name would be refused there."""
    text = (peers.folder("verl_omni") / "verl_omni/workers/config/diffusion/actor.py").read_text()
    names = text[text.index("valid_modes = [") :]
    assert all(f'"{name}"' in names[: names.index("]")] for name in verl_omni.LOSSES)


def test_a_whole_loop(theirs, schedulers):
    latents = []
    for one in schedulers:
        x = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1))
        g = torch.Generator().manual_seed(2)
        for t in one.timesteps:
            x = one.step(torch.tanh(x), t, x, generator=g).prev_sample
        latents.append(x)
    near(latents[1], latents[0], 1e-5)
    verl_omni.register()
    assert theirs[0].FlowMatchSDEDiscreteScheduler.sample_previous_step is verl_omni.sample_previous_step


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss(theirs, weighted):
    functions = [theirs[1].get_diffusion_loss_fn("flow_grpo")]
    verl_omni.register()
    functions += [theirs[1].get_diffusion_loss_fn(name) for name in ("flow_grpo", "dance_grpo")]
    old, noise, adv, weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    data = {"old_log_probs": old, "advantages": 4 * adv}
    data |= {"rollout_is_weights": weight.abs()} if weighted else {}
    values = []
    for function in functions:
        leaf = (old + 2e-4 * noise).requires_grad_()
        function.validate_inputs(loss_name="flow_grpo", model_output={"log_probs": leaf}, data=data)
        out = function(config=CONFIG, model_output={"log_probs": leaf}, data=data)
        out.loss.backward()
        values.append((out.loss.detach(), leaf.grad, out.metrics))
    (loss, grad, metrics), *ours = values
    for our_loss, our_grad, our_metrics in ours:
        near(our_loss, loss)
        near(our_grad, grad)
        assert our_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)

"""The peers' own trainers, unmodified, with and without the launcher; needs their checkouts in PREFGRPO_PEERS and is
skipped otherwise.

Why these cases: each real script runs on a tiny pipeline (benchmarks/peer_runs.py), from its command line to the end of
its second training step, with two optimiser updates per step, so that importance ratios differ from 1 and the second
rollout uses trained weights. With equal seeds, every logged loss, KL and gradient norm must agree with and without us.
"""

import json
import os
import subprocess
import sys

import peers
import pytest

TRAINERS = {
    "flow_grpo_sd3": "flow_grpo.diffusers_patch.sd3_sde_with_logprob.sde_step_with_logprob",
    "flow_grpo_flux": "flow_grpo.diffusers_patch.sd3_sde_with_logprob.sde_step_with_logprob",
    "dance_grpo_flux": "train_grpo_flux.flux_step",
    "pref_grpo_flux": "fastvideo.grpo.steps.flow_grpo_step",
    "flow_factory_flux": "FlowMatchEulerDiscreteSDEScheduler.step",
}
QUICK = "flow_grpo_sd3"


def steps(root, out, *arguments):
    """Run a peer's trainer; returns the training steps that it recorded, and its stderr."""
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    env["PREFGRPO_PEERS"] = os.path.abspath(env["PREFGRPO_PEERS"])
    command = [sys.executable, "-m", "benchmarks.peer_runs", *arguments, "--steps", "2", "--out", str(out)]
    run = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(out.read_text())["steps"], run.stderr


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.full) for name in TRAINERS]
)
def test_equal_losses_through_the_launcher(root, tmp_path, name):
    peers.folder(name.rpartition("_")[0])
    theirs, _ = steps(root, tmp_path / "theirs.json", name)
    ours, printed = steps(root, tmp_path / "ours.json", name, "--launcher")
    assert "prefgrpo: patched" in printed and TRAINERS[name] in printed
    assert [s["patched"] for s in theirs + ours] == [False] * 2 + [True] * 2
    pairs = [(a, b) for s, t in zip(theirs, ours, strict=True) for a, b in zip(s["losses"], t["losses"], strict=True)]
    assert len(pairs) == (4 if "flow_grpo" in name or "factory" in name else 2)
    largest = max(abs(a[key] - b[key]) for a, b in pairs for key in a)
    assert all(a.keys() == b.keys() for a, b in pairs) and largest <= 1e-6, (largest, pairs)
    learned = [abs(a[key]) for a, _ in pairs for key in a if "loss" in key or "norm" in key]
    assert max(learned) > 1e-6, "losses and gradients were not all 0"
    print(f"{name}: largest difference of what is logged {largest:.1e}")

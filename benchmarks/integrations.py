"""The drop-in steps beside the real functions that they replace, from checkouts in PREFGRPO_PEERS (docs/ops.md).

Those functions wait for the device, so a call cannot be queued: what it costs on the host, and its launches, are
measured. Invariant: both get the same scheduler and inputs, and give the fp64 log-prob and gradient.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from benchmarks.harness import Case, Results
from benchmarks.sde_step import BF16, ETA, F32, NAMES, SIGMA, SIGMA_NEXT, drawn_truth, inputs, truth
from prefgrpo.integrations import flow_grpo, verl_omni

FLOW_GRPO = "flow_grpo/flow_grpo/diffusers_patch/sd3_sde_with_logprob.py"
VERL_OMNI = "verl-omni/verl_omni/pipelines/schedulers/flow_match_sde.py"
PEERS: dict[str, tuple[str, Any, torch.dtype]] = {
    FLOW_GRPO: ("sde_step_with_logprob", flow_grpo.sde_step_with_logprob, BF16),
    VERL_OMNI: ("FlowMatchSDEDiscreteScheduler.sample_previous_step", verl_omni.sample_previous_step, F32),
}
"""A peer's file → its step, ours, and the dtype of v; both take the same keywords."""


def sample(i: dict[str, Any], step: Any) -> Results:
    """x' and logp."""
    with torch.no_grad():
        x_next, logp, *_ = step(model_output=i["v"], sample=i["x"])
    return {"x_next": x_next, "logp": logp}


def score(i: dict[str, Any], step: Any) -> Results:
    """logp of a stored x', and its gradient."""
    v = i["v"].detach().requires_grad_()
    logp = step(model_output=v, sample=i["x"], prev_sample=i["y"])[1]
    return {"logp": logp, "dv": torch.autograd.grad(logp, v, i["upstream"][0])[0]}


def cases(device: str, shape: tuple[int, ...] = (4, 16, 128, 128)) -> Iterator[Case]:
    """Sampling and scoring, by default at SD3.5's 1024²; nothing without a checkout."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[1.0, SIGMA, SIGMA_NEXT], device=device)
    fixed = {"timestep": scheduler.timesteps[[1] * shape[0]], "noise_level": ETA}
    for file, (name, ours, dtype) in PEERS.items():
        path = Path(os.environ.get("PREFGRPO_PEERS", "")) / file
        if not path.is_file():
            continue
        theirs = attrgetter(name)(SimpleNamespace(**runpy.run_path(str(path))))
        steps = {"ours": partial(ours, scheduler, **fixed), "theirs": partial(theirs, scheduler, **fixed)}
        make = partial(inputs, shape, F32, dtype, device)
        for what, call, want in (("sampling", sample, drawn_truth), ("scoring with gradient", score, truth)):
            variants: dict[str, Any] = {side: partial(call, step=step) for side, step in steps.items()}
            labels = (f"{file.split('/')[1]}, {what}", "×".join(map(str, shape)), f"x fp32, v {NAMES[dtype]}")
            yield Case(*labels, 0, make, variants, want, is_host_only=True)

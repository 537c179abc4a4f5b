#!/usr/bin/env bash
# Guess: UniPC with use_flow_sigmas and use_beta_sigmas (or Karras, exponential) spaces the flow sigmas of a pipeline
# otherwise, between the same ends, as FlowMatchEulerDiscreteScheduler does with the same options.
# What happens: set_timesteps(sigmas=...), which pipelines of flow models call, turns the sigmas round before it spaces
# them, as suits the training sigmas of a variance-preserving model, which rise: so sampling begins at the lowest sigma
# and ends at 1, for pure noise. set_timesteps(N) takes the variance-preserving sigmas instead: the first is 157, not 1.
# Karras' are then divided by 1 + sigma, the others are not. No error and no line in the log.
# Versions: diffusers 0.42.1, scipy 1.17.1. Source: UniPCMultistepScheduler.set_timesteps, where the branches of Karras,
# exponential and beta come before that of use_flow_sigmas. DPMSolverMultistepScheduler's set_timesteps(N) is alike.
# Hurt: whoever turns beta sigmas on for Wan or another pipeline that comes with UniPC.
# Seen 2026-11-29, first and last sigma before the final 0, of linspace(1, 0.1, 10), shift 3:
#   none 1.0 .25; beta .1 1.0; exponential .1 1.0; Karras .091 .5; flow Euler with beta 1.0 .25; UniPC, 10 steps, beta 157.4
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 scipy==1.17.1 numpy==2.4.6
cat > "$tmp/sigmas.py" <<'PY'
import diffusers, numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

flow = dict(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
given = np.linspace(1.0, 0.1, 10)
seen = {}
for kind in ("none", "beta", "exponential", "karras"):
    options = {} if kind == "none" else {f"use_{kind}_sigmas": True}
    scheduler = UniPCMultistepScheduler(**flow, **options)
    scheduler.set_timesteps(sigmas=given)
    seen[kind] = scheduler.sigmas[:-1].tolist()
euler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_beta_sigmas=True)
euler.set_timesteps(sigmas=given)
seen["Euler, beta"] = euler.sigmas[:-1].tolist()
ends = {kind: (round(sigmas[0], 3), round(sigmas[-1], 3)) for kind, sigmas in seen.items()}
alone = UniPCMultistepScheduler(**flow, use_beta_sigmas=True)
alone.set_timesteps(10)
print("diffusers", diffusers.__version__, ends, "set_timesteps(10):", round(float(alone.sigmas[0]), 1))
rising = {kind: bool(np.all(np.diff(sigmas) > 0)) for kind, sigmas in seen.items()}
assert rising == {"none": False, "beta": True, "exponential": True, "karras": True, "Euler, beta": False}
assert ends["none"] == ends["Euler, beta"] == (1.0, 0.25) and ends["beta"] == (0.1, 1.0)
assert 157 < alone.sigmas[0] < 158
PY
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/sigmas.py"

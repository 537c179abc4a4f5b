"""Four samples of every family, dealt out over the ranks as training deals them; torchrun starts it for all at once.

The folders are made beforehand: in a process group, transformers' save_pretrained writes on rank 0 only.
"""

import json
import sys
from pathlib import Path

import torch
from families import CASES, PROMPTS, SIZES, conditions, load, small_sources
from safetensors.torch import save_file

from prefgrpo.parallel import world as parallel
from prefgrpo.rollout.embed import select
from prefgrpo.rollout.rollout import rollout
from prefgrpo.sde.schedule import make_schedule

TOTAL = 4


def samples(case, path, slots):
    """[n, …] fp32 pixels and [n, 2] log-probs of the samples with these numbers."""
    adapter, size = load(case, path), SIZES[0]
    schedule = make_schedule(adapter.sigmas(3, *size), "flow", 0.7, (0, 1))
    rows = torch.tensor(list(slots))
    condition = select(conditions(adapter, case, PROMPTS * 2, size), rows)
    done = rollout(adapter, schedule, condition, rows + 7, seed=5, height=size[0], width=size[1])
    logp = torch.stack([step.logp for step in done.steps], dim=1)
    return adapter.decode(done.latents, *size).contiguous(), logp


def main():
    torch.set_num_threads(1)
    world = parallel.start("cpu")
    out = Path(sys.argv[1])
    folders = json.loads((out / "folders.json").read_text())
    with small_sources():
        found = {str(case): samples(case, folders[case.family], world.slots(TOTAL)) for case in CASES}
    tensors = {f"{name}/{kind}": t for name, both in found.items() for kind, t in zip(("x", "logp"), both, strict=True)}
    save_file(tensors, out / f"{world.rank}.safetensors")
    parallel.stop()


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# Guess: between steps the parameters of a module under fully_shard are its shards, so that a forward without gradients
# (an evaluation) changes nothing, and what is written into parameters() after it stays.
# What happens: the outermost module keeps its own parameters gathered after a forward, until its next backward. After an
# evaluation they are plain full tensors beside the DTensors of the inner modules. What is written into them is used by
# the next forward, and thrown away by its backward, which goes back to the old shards. No error, no warning.
# Versions: torch 2.13.0. Source: fully_shard's reshard_after_forward=None, which is False for the root.
# Hurt: whoever copies weights in after an evaluation (EMA, a reset): the norm, embedding and head of many models belong
# to the root. module.reshard() after the evaluation prevents it.
# Seen 2026-11-29, first elements of both layers of Sequential(Linear, Linear), 7 written into each:
#   after an evaluation: inner DTensor, root Tensor; output of the next forward as with 7 in both (987)
#   after its backward: inner 7.0, root as before the writing; with reshard(): both 7.0
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$tmp/write.py" <<'PY'
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
x = torch.ones(1, 4)
for resharded in (False, True):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    before = net[1].weight.full_tensor()[0, 0].item()
    with torch.no_grad():
        net(x)
        if resharded:
            net.reshard()
        kinds = [type(net[k].weight.data).__name__ for k in (0, 1)]
        for parameter in net.parameters():
            parameter.fill_(7.0)
    out = net(x)
    out.sum().backward()
    assert all(isinstance(p, DTensor) for p in net.parameters())
    first = [net[k].weight.full_tensor()[0, 0].item() for k in (0, 1)]
    if dist.get_rank() == 0:
        print("torch", torch.__version__, "reshard()" * resharded, kinds, out[0, 0].item(), first, "before", before)
    assert kinds == ["DTensor", "DTensor" if resharded else "Tensor"]
    assert out[0, 0].item() == (7 * 4 + 7) * 7 * 4 + 7
    assert first == ([7.0, 7.0] if resharded else [7.0, before])
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$tmp/venv/bin/torchrun" --nproc_per_node 2 --standalone "$tmp/write.py" 2> "$tmp/log" || { cat "$tmp/log"; exit 1; }

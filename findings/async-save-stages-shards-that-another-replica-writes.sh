#!/usr/bin/env bash
# Guess: with weights sharded within replicas (HSDP), torch.distributed.checkpoint keeps one copy of each shard, so a
# process copies to CPU memory what it will write.
# What happens: one copy is written, spread evenly over the replicas, but async_save copies first and removes duplicates
# later: every process holds all of its shards a second time until the write ends, whatever it writes of them. With
# dedup_save_to_lowest_rank the first replica writes everything and the others still copy all.
# Versions: torch 2.13.0. Source: async_save calls storage_writer.stage on the whole state; dedup_save_plans runs in the
# global plan, in the writing thread.
# Hurt: whoever sizes host memory by bytes written: 8 replicas of a 20B model with AdamW stage 8 × 245 GB.
# Seen 2026-11-28, MiB (staged, written) by rank, of 32 MiB of weights, 2 replicas × 2 shards:
#   default: (16, 8) (16, 8) (16, 8) (16, 8); lowest rank: (16, 16) (16, 16) (16, 0) (16, 0)
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$tmp/save.py" <<'PY'
import sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

class Counting(FileSystemWriter):
    def stage(self, state):
        copied = super().stage(state)
        given = {t.to_local().data_ptr() for t in state.values()}
        assert not given & {t.to_local().data_ptr() for t in copied.values()}
        self.staged = sum(t.to_local().nbytes for t in copied.values())
        return copied

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
full = torch.arange(2**21, dtype=torch.float32)  # 8 MiB
state = {str(i): distribute_tensor(full, mesh, [Replicate(), Shard(0)]) for i in range(4)}
seen = {}
for lowest in (False, True):
    folder = Path(sys.argv[1]) / str(lowest)
    writer = Counting(folder)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    async_save(state, storage_writer=writer, planner=planner).result()
    written = sum(file.stat().st_size for file in folder.glob(f"__{rank}_*"))
    seen[lowest] = [None] * 4
    dist.all_gather_object(seen[lowest], (writer.staged >> 20, written >> 20))
if rank == 0:
    print("torch", torch.__version__, "default:", *seen[False], "lowest rank:", *seen[True])
assert seen[False] == [(16, 8)] * 4 and seen[True] == [(16, 16)] * 2 + [(16, 0)] * 2
PY
OMP_NUM_THREADS=1 "$tmp/venv/bin/torchrun" --nproc_per_node 4 --standalone "$tmp/save.py" "$tmp/checkpoints"

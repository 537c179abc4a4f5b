#!/usr/bin/env bash
# Guess: Triton's interpreter converts fp32 to float8e4nv as the compiled kernel and as torch do: to the nearest number of
# e4m3, ties to even.
# What happens: ties are rounded up, and a mantissa that is rounded up to the next power of two loses the carry, so that
# 1.97 becomes 1 and not 2; numbers that are subnormal in e4m3 (below 2^-6) are rounded down.
# Versions: Triton 3.7.1, torch 2.13.0 (which rounds to nearest even).
# Hurt: whoever tests a quantisation kernel in the interpreter against torch: bits differ that agree on a GPU, or the
# reference is changed to what only the interpreter does.
# Seen 2026-11-29: 1.0625 -> 1.125 (torch 1), 1.97 -> 1 (2), 0.123 -> .0625 (.125), .0089 -> .0078125 (.0097656), 100 -> 104
# (96); 3.1, .02 and 1.25 as torch; of 65,536 numbers from 1 to 448 778 differ, by up to half.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 triton==3.7.1 numpy==2.4.6
cat > "$tmp/fp8.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def cast(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.float8e4nv))


def both(x):
    y = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    cast[(1,)](x, y, N=x.numel())
    return y.float(), x.to(torch.float8_e4m3fn).float()


print("torch", torch.__version__, "triton", triton.__version__)
x = torch.tensor([1.0625, 1.97, 0.123, 0.0089, 3.1, 0.02, 1.25, 100.0])
ours, theirs = both(x)
for row in zip(x.tolist(), ours.tolist(), theirs.tolist()):
    print("x %.4g, interpreter %.5g, torch %.5g" % row)
every = torch.linspace(1, 448, 2**16)
ours, theirs = (torch.cat(parts) for parts in zip(*map(both, every.split(4096))))
print("of 65536 numbers from 1 to 448:", int((ours != theirs).sum()), "differ, by up to", float((ours / theirs - 1).abs().max()))
assert ours.div(theirs).sub(1).abs().max() >= 0.5
ours, theirs = both(x)
assert ours.tolist()[:4] == [1.125, 1.0, 0.0625, 0.0078125] and theirs.tolist()[:4] == [1.0, 2.0, 0.125, 0.009765625]
assert ours.tolist()[4:7] == theirs.tolist()[4:7]
PY
OMP_NUM_THREADS=1 TRITON_INTERPRET=1 "$tmp/venv/bin/python" "$tmp/fp8.py"

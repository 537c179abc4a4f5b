#!/usr/bin/env bash
# Guess: // and % of a kernel's integers round in one way, that of C (towards zero), as Triton's documentation says of
# tensors; and Triton's interpreter agrees with compiled code.
# What happens: a launch turns an integer argument that equals 1 into a constant, and constants divide as in Python
# (downwards). So in one kernel, with -n // 2 and -n % 2, n = 1 gives -1 and 1 where n = 3 gives -1 and -1, and the code
# compiled for other n would give 0 and -1 for 1. The interpreter makes no constants: it gives 0 and -1 for n = 1, so a
# test in the interpreter passes and the GPU differs, for this one value.
# Versions: triton 3.7.1 (torch 2.13.0 for the interpreter). Compiled for sm_90 without a GPU; the constants are read
# from the intermediate code, and what a launch does to 1 from its own specialisation function.
# Hurt: kernels that round down with negative offsets, such as windows and ring indices, at a size of 1.
# do_not_specialize=["n"], or tl.full for the operand, makes 1 an ordinary value.
# Seen 2026-11-29, (-n // 2, -n % 2): interpreter n=1 (0, -1), n=3 (-1, -1); compiled n=1 (-1, 1); n=3 divsi, remsi.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 triton==3.7.1 numpy==2.4.6
cat > "$tmp/one.py" <<'PY'
import os, re, sys

interpreted = sys.argv[1] == "interpreter"
if interpreted:
    os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl

@triton.jit
def divide(out, n):
    tl.store(out, -n // 2)
    tl.store(out + 1, -n % 2)

if interpreted:
    seen = {}
    for n in (1, 3):
        out = torch.zeros(2, dtype=torch.int32)
        divide[(1,)](out, n)
        seen[n] = out.tolist()
    print("triton", triton.__version__, "interpreter:", seen)
    assert seen == {1: [0, -1], 3: [-1, -1]}
else:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.compiler import ASTSource

    kinds = {n: native_specialize_impl(BaseBackend, n, False, True, True)[0] for n in (1, 3)}
    target = GPUTarget("cuda", 90, 32)
    one = triton.compile(ASTSource(divide, {"out": "*i32", "n": "constexpr"}, {"n": 1}), target=target).asm["ttir"]
    other = triton.compile(ASTSource(divide, {"out": "*i32", "n": "i32"}), target=target).asm["ttir"]
    stored = re.findall(r"tt\.store %\w+, %c(-?\d+)_i32", one)
    print("a launch takes", kinds, "compiled n=1:", stored, "n=3:", re.findall(r"divsi|remsi|floordivsi", other))
    assert kinds == {1: "constexpr", 3: "i32"} and stored == ["-1", "1"]
    assert re.findall(r"divsi|remsi", other) == ["divsi", "remsi"]
PY
for kind in interpreter compiled; do
    TRITON_CACHE_DIR="$tmp/cache" OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/one.py" $kind
done

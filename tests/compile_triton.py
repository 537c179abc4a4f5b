"""Compiles every Triton kernel to a cubin without a GPU and prints one JSON line each: registers, stack, wide accesses.

Run as a script, in a process without TRITON_INTERPRET: python compile_triton.py ARCH[:kernel,kernel] …
"""

import json
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prefgrpo.kernels import affine, noise, small

NUMBERS = {"scale", "to_c", "to_u", "eps", "clip_low", "clip_high", "adv_clip", "kl_coef", "denominator"}


def arguments(kernel):
    """(argument types, constexpr values) of a typical call: bf16 velocities, fp32 latents."""
    types, fixed = {}, {}
    flags = {"BLOCK": 2048, "NOISE": 2, "ROWS": 8}
    for p in kernel.params:
        if p.is_constexpr:
            fixed[p.name] = flags.get(p.name, True)
            types[p.name] = "constexpr"
        elif p.name.endswith("_ptr"):
            name = p.name.removesuffix("_ptr")
            velocity = name in ("v", "u", "c", "ref", "old", "dv", "du")
            ids = name in ("index", "sample", "step")
            kind = "i64" if ids else "bf16" if velocity else "fp32"
            types[p.name] = f"*{kind}"
        else:
            types[p.name] = (
                "fp32" if p.name in NUMBERS else "i64" if p.name in ("offset", "seed_low", "seed_high") else "i32"
            )
    if kernel in (affine.guide_kernel, small.winrate_kernel):
        fixed["BLOCK"] = 64
    if kernel is affine.finish_kernel:
        fixed["BLOCK"] = 1024
    return types, fixed


KERNELS = {
    "step": affine.step_kernel,
    "logp": affine.logp_kernel,
    "finish": affine.finish_kernel,
    "grad": affine.grad_kernel,
    "guide": affine.guide_kernel,
    "normal": noise.normal_kernel,
    "policy": small.policy_kernel,
    "winrate": small.winrate_kernel,
}


def resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers, stack bytes, instructions) of a cubin."""
    tools = f"{triton.__path__[0]}/backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = [f"{tools}/cuobjdump", "-res-usage", file.name], [f"{tools}/nvdisasm", "-c", file.name]
        text, code = (subprocess.run(c, check=True, capture_output=True, text=True).stdout for c in commands)
    length = len(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?!NOP|BRA)\S", code))
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1]), length


def main() -> None:
    """Compile all kernels for each architecture given."""
    for word in sys.argv[1:]:
        arch, _, chosen = word.partition(":")
        for name in chosen.split(",") if chosen else KERNELS:
            kernel = KERNELS[name]
            types, fixed = arguments(kernel)
            names = list(types)
            aligned = [n for n in names if types[n].startswith("*") or n.endswith("stride") or n == "dim"]
            attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}  # as a launch would infer
            source = ASTSource(kernel, types, {(names.index(n),): value for n, value in fixed.items()}, attrs)
            done = triton.compile(source, target=GPUTarget("cuda", int(arch), 32), options={"enable_fp_fusion": False})
            registers, stack, instructions = resources(done.asm["cubin"])
            ptx = done.asm["ptx"]
            line = {"kernel": name, "arch": int(arch), "registers": registers, "stack": stack}
            if "BLOCK" in fixed and fixed["BLOCK"] == 2048:
                line["instructions"] = instructions * 128 / 2048  # per element: 4 warps on 2048
            line["wide"] = len(re.findall(r"ld\.global[.\w]*\.v4", ptx)), len(re.findall(r"st\.global[.\w]*\.v4", ptx))
            each = [len(re.findall(rf"\bfma\.rn\.{kind}", ptx)) for kind in ("f32", "f32x2")]  # x2: two at once
            line["fused"] = sum(each)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

"""Compiles Triton's kernels to cubins without a GPU and prints one JSON line each: stack, wide accesses, sum layouts.

Run as a script, in a process without TRITON_INTERPRET: python compile_triton.py ARCH few|all
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prefgrpo.kernels import noise, policy_loss, sde_step, winrate

F32, BF16, F16 = "fp32", "bf16", "fp16"
KERNELS = {
    "step": sde_step.step_kernel,
    "logp": sde_step.logp_kernel,
    "finish": sde_step.finish_kernel,
    "grad": sde_step.grad_kernel,
    "normal": noise.normal_kernel,
    "policy": policy_loss.policy_kernel,
    "winrate": winrate.winrate_kernel,
}
IDS = ("index", "sample", "step")
BITS = ("low", "high", "log_low", "log_high", "adv_clip", "kl_coef", "norm", "offset", "seed_low", "seed_high")
"""Numbers passed as 64 bits."""
DTYPES = [(F32, BF16, F32), (F32, F32, F32), (BF16, BF16, BF16), (F32, F32, BF16), (F32, BF16, BF16), (F16, F16, F16)]
"""Of x, v and x': what the ops pass on."""


def variants(few):
    """(kernel, dtypes of x, v and x', constexprs): all that the ops launch, or one per kernel with every option on."""
    bulk = {"BLOCK": 2048, "HAS_INDEX": True}
    dtypes = DTYPES[:1] if few else DTYPES
    flags = (True,) if few else (False, True)
    noises = [(2, True)] if few else [(0, True), (1, True), (2, True), (2, False)]
    for d, (kind, aligned), mean in itertools.product(dtypes, noises, flags):
        yield "step", d, bulk | {"NOISE": kind, "ALIGNED": aligned, "MEAN": mean}
    for d, kl, guard in itertools.product(dtypes, flags, flags):
        yield "logp", d, bulk | {"KL": kl, "GUARD": guard}
        yield "grad", d, bulk | {"LOGP": True, "KL": kl, "GUARD": guard}
    if not few:
        yield "grad", DTYPES[0], bulk | {"LOGP": False, "KL": True, "GUARD": False}
        yield "step", DTYPES[0], bulk | {"NOISE": 1, "ALIGNED": True, "MEAN": True, "HAS_INDEX": False}
    yield "normal", DTYPES[0], {"BLOCK": 2048, "ALIGNED": True}
    for kl, guard in itertools.product(flags, flags):
        yield "finish", DTYPES[0], {"BLOCK": 512, "HAS_INDEX": True, "KL": kl, "GUARD": guard}
    for weight, kl, ratio in itertools.product(flags, flags, flags):
        yield "policy", DTYPES[0], {"BLOCK": 512, "WEIGHT": weight, "KL": kl, "RATIO": ratio}
    for std, block in itertools.product(flags, (2, 32, 64) if not few else (32,)):
        yield "winrate", DTYPES[0], {"BLOCK": block, "USE_STD": std}


def source(kernel, dtypes, fixed, numbers):
    """The kernel for arguments of these types. numbers: \"round\" (divisible by 16), \"odd\" or \"one\" (1)."""
    velocity = dict.fromkeys(("v", "ref", "old", "dv"), dtypes[1])
    kinds = {"x": dtypes[0], "y": dtypes[2], "out": dtypes[2], **velocity, **dict.fromkeys(IDS, "i64")}
    types = {}
    constants = {}
    attributes = {}
    for k, p in enumerate(kernel.params):
        name = p.name.removesuffix("_ptr")
        whole = not p.is_constexpr and not p.name.endswith("_ptr")
        if p.is_constexpr or (whole and numbers == "one" and name not in (*BITS, "eps")):
            types[p.name] = "constexpr"
            constants[(k,)] = fixed.get(p.name, 1)
        elif p.name.endswith("_ptr"):
            types[p.name] = f"*{kinds.get(name, F32)}"
        else:
            types[p.name] = "i64" if name in BITS else F32 if name == "eps" else "i32"
        if numbers == "round" and not p.is_constexpr and name not in (*BITS, "eps"):
            attributes[(k,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, types, constants, attributes)


def inspect(cubin: bytes) -> tuple[int, int]:
    """(stack bytes, instructions) of a cubin."""
    tools = f"{triton.__path__[0]}/backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = [f"{tools}/cuobjdump", "-res-usage", file.name], [f"{tools}/nvdisasm", "-c", file.name]
        text, code = (subprocess.run(c, check=True, capture_output=True, text=True).stdout for c in commands)
    return int(re.search(r"STACK:(\d+)", text)[1]), len(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?!NOP|BRA)\S", code))


def sum_layout(ir: str) -> str:
    """How the first sum of a kernel is spread over its threads: the order of the sum."""
    names = re.findall(r"\}\) : \(tensor<2048xf32, (#\w+)>\) -> f32", ir)
    return re.search(rf"{names[0]} = (.*)", ir)[1] if names else ""


def main() -> None:
    """Compile the kernels for one architecture."""
    arch = int(sys.argv[1])
    few = sys.argv[2] == "few"
    for name, dtypes, fixed in variants(few):
        for numbers in ("round",) if few or dtypes not in DTYPES[:2] else ("round", "odd", "one"):
            program = source(KERNELS[name], dtypes, fixed, numbers)
            done = triton.compile(program, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": False})
            ptx = done.asm["ptx"]
            stack, instructions = inspect(done.asm["cubin"])
            wide = [len(re.findall(rf"{op}\.global[.\w]*\.v4", ptx)) for op in ("ld", "st")]
            line = {"kernel": name, "arch": arch, "dtypes": dtypes, "fixed": fixed, "numbers": numbers, "wide": wide}
            line |= {"stack": stack, "per_element": instructions * 128 / 2048, "sum": sum_layout(done.asm["ttgir"])}
            line["fused"] = len(re.findall(r"\bfma\.rn\.f32", ptx))
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

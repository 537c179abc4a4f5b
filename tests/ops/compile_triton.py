"""Compiles Triton's kernels to cubins without a GPU and prints one JSON line each: stack, wide accesses, sum layouts,
types of scalars.

The ops themselves are called, with a driver that names a GPU; each launch compiles its kernel instead of running it.
Run as a script, in a process without TRITON_INTERPRET:

    python tests/ops/compile_triton.py ARCH few|all|layouts|table

layouts: latents that begin anywhere in memory; table prints the kernels of transformer
blocks at FLUX's widths as Markdown (docs/benchmarks.md).
"""

import itertools
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the package is not installed

from prefgrpo.ops import (
    PhiloxNoise,
    _backend,
    gated_residual,
    layernorm_modulate,
    philox_normal,
    policy_loss,
    qk_norm_rope,
    sde_logp,
    sde_step,
    winrate_advantage,
)
from prefgrpo.ops.low_rank_gelu import low_rank_gelu
from prefgrpo.ops.quantise_rows import FP8, dequantise_rows, quantise_rows
from prefgrpo.sde.rows import sde_rows
from prefgrpo.sde.rules import RULES

ARCH = int(sys.argv[1])
FEW = sys.argv[2] == "few"
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [(F32, BF16, F32), (F32, F32, F32), (BF16, BF16, BF16), (F32, F32, BF16), (F32, BF16, BF16)]
"""Of x, v and x': what the ops pass on."""
NUMBERS = {"round": (16, 4096), "odd": (3, 4097), "one": (1, 1)}
"""(B, D): sizes divisible by 16 or not, and 1, get code of their own."""
OVER_LATENTS = ("step", "logp", "grad", "normal")
"""Kernels whose instructions are counted."""
FIXED = ("NOISE", "GRAD", "ACROSS", "PER_PAIR", "INTERLEAVED", "QUERIES", "GROUP", "H")
seen = set()
lines: list[dict] = []


def compile_instead(kernel: JITFunction, about: dict, *args: object, **options: object) -> None:
    """Compile what this launch would run, once, and print what it became."""
    compiled = kernel.run(*args, grid=(1,), warmup=True, **options)
    if compiled.hash in seen:
        return
    seen.add(compiled.hash)
    ptx = compiled.asm["ptx"]
    named = dict(zip(kernel.arg_names, args, strict=False)) | options
    name = kernel.fn.__name__.removesuffix("_kernel")
    line = about | {"kernel": name, "arch": ARCH} | resources(compiled.asm["cubin"])
    scalars = {name: kind for name, kind in compiled.src.signature.items() if isinstance(named.get(name), int | float)}
    line["scalars"] = {name: kind for name, kind in scalars.items() if kind != "constexpr"}
    line["floats"] = [name for name in line["scalars"] if isinstance(named[name], float)]
    line["fixed"] = {name: named[name] for name in FIXED if name in named}
    line["wide"] = [len(re.findall(rf"{op}\.global[.\w]*\.v4", ptx)) for op in ("ld", "st")]
    line["global"] = [len(re.findall(rf"\b{op}\.global", ptx)) for op in ("ld", "st")]
    line["fused"] = len(re.findall(r"\bfma\.rn\.f32", ptx))
    if name in OVER_LATENTS and about["numbers"] == "round":
        line["per_element"] = instructions(compiled.asm["cubin"]) * 128 / 2048
    line["sum"] = sum_layout(compiled.asm["ttgir"])
    lines.append(line)
    if sys.argv[2] != "table":
        print(json.dumps(line), flush=True)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [f"{triton.__path__[0]}/backends/nvidia/bin/cuobjdump", "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name.lower(): int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", text)}


def instructions(cubin: bytes) -> int:
    """Number of instructions of a thread, of 16 bytes each, with a few NOPs at the end: the size of its code in the
    cubin, an ELF file."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + size * k) for k in range(count)]
    start = sections[names][4]
    is_code = [cubin.startswith(b".text.", start + name) for name, *_ in sections]
    return sum(section[5] for section, code in zip(sections, is_code, strict=True) if code) // 16


def sum_layout(ir: str) -> str:
    """How the first sum of a kernel is spread over its threads: the order of the sum."""
    names = re.findall(r"\}\) : \(tensor<2048xf32, (#\w+)>\) -> f32", ir)
    return re.search(rf"{names[0]} = (.*)", ir)[1] if names else ""


def latents(numbers: str, x_dtype: torch.dtype, v_dtype: torch.dtype, y_dtype: torch.dtype) -> None:
    """A step and a replay with its gradients: of the usual dtypes with every kind of noise and every output, of the
    others the largest."""
    batch, dim = NUMBERS[numbers]

    def zeros(dtype: torch.dtype) -> torch.Tensor:  # odd ones begin off a multiple of 16 bytes
        start = int(numbers == "odd")
        return torch.zeros(batch * dim + start, dtype=dtype)[start:].view(batch, dim)

    x, v, y, eps = map(zeros, (x_dtype, v_dtype, y_dtype, F32))
    coef, ids = torch.zeros(batch, 5), torch.arange(batch)
    noises = [PhiloxNoise(1, ids, ids), eps, None]
    most = not FEW and (x_dtype, v_dtype, y_dtype) == DTYPES[0] and numbers != "one"
    steps = itertools.product(noises, (False, True), (ids, None)) if most else [(noises[0], True, ids)]
    for noise, mean, index in steps:
        sde_step(x, v, coef, index, noise=noise, out_dtype=y_dtype, want_mean=mean)
    for ref, old in itertools.product((None, v), repeat=2) if most else [(v, v)]:
        leaf = v.clone().requires_grad_()
        out = sde_logp(x, leaf, y, coef, ids, v_ref=ref, v_old=old)
        sum(t.sum() for t in out if t is not None).backward()
        if ref is not None and most:
            leaf = v.clone().requires_grad_()
            sde_logp(x, leaf, y, coef, ids, v_ref=ref).kl.sum().backward()


def some(options: Iterable[tuple]) -> list[tuple]:
    """All options, or of a few kernels the last, which needs most."""
    return list(options)[-1:] if FEW else list(options)


def small(batch: int, dim: int) -> None:
    """The other ops."""
    ids = torch.arange(batch)
    column = torch.zeros(batch)
    for seed in (1, 2**63 + 5):
        philox_normal(seed, ids, ids, dim, offset=4 * (seed % 7))
    for group, std in some(itertools.product((2, 24, 64), ("none", "group"))):
        winrate_advantage(torch.zeros(batch, group, group), torch.zeros(batch, group, group), std=std)
    for rule, ends in some(itertools.product(RULES, (0.5, column))):
        sde_rows(rule, column, column, ends, ends, ends)
    for old, weight, kl in some(itertools.product((None, column), repeat=3)):
        reduction = "mean" if weight is None else "none"
        for epsilon in (0.1, 2.0):
            policy_loss(column, old, column, epsilon_low=epsilon, weight=weight, kl=kl, reduction=reduction)


def layouts() -> None:
    """Steps and replays of latents of which each one in turn, all or none begin off a multiple of 16 bytes."""
    names = ("x", "v", "y", "eps", "v_ref", "v_old")
    for numbers, dtypes in (("round", DTYPES[0]), ("round", DTYPES[2]), ("odd", DTYPES[0])):
        batch, dim = NUMBERS[numbers]
        about = {"numbers": numbers, "dtypes": [str(d) for d in dtypes]}
        JITFunction.__getitem__ = lambda kernel, grid, about=about: partial(compile_instead, kernel, about)
        kinds = dict(zip(names, (*dtypes, F32, dtypes[1], dtypes[1]), strict=True))
        coef = torch.zeros(batch, 5)
        for off in ((), *((name,) for name in names if numbers == "round"), names):
            size = batch * dim
            i = {n: torch.zeros(size + 16, dtype=d)[(n in off) :][:size].view(batch, dim) for n, d in kinds.items()}
            sde_step(i["x"], i["v"], coef, noise=i["eps"], out_dtype=dtypes[2])
            sde_logp(i["x"], i["v"], i["y"], coef)
            sde_logp(i["x"], i["v"], i["y"], coef, v_ref=i["v_ref"], v_old=i["v_old"])


WIDTHS = {"FLUX": (24, 128), "SD3.5": (38, 64), "Wan 14B": (40, 128), "odd": (3, 22)}
"""Heads and channels of a head; the last has rows off multiples of 16 bytes."""
VECTORS = [(BF16, BF16), (F32, F32), (BF16, F32)]
"""Dtypes of tokens, and of shift, scale and gate."""
USED = {"FLUX": VECTORS, "SD3.5": VECTORS[:1], "Wan 14B": VECTORS[:2], "odd": VECTORS[:2]}
"""Every dtype at one width, every width in bf16, and the widest and the odd one in fp32, which needs most registers."""


def blocks(model: str, dtype: torch.dtype, vector_dtype: torch.dtype, about: dict) -> None:
    """The ops of transformer blocks with their gradients, as LoRA and as full fine-tuning call them."""
    heads, dim = WIDTHS[model]
    channels = heads * dim
    for trained in (False, True):
        about |= {"what": "all weights" if trained else "LoRA"}
        x = torch.zeros(2, 64, 3 * channels, dtype=dtype).requires_grad_()
        q, k, y = x.chunk(3, 2)
        vectors = torch.zeros(2, 6 * channels, dtype=vector_dtype).requires_grad_(trained).chunk(6, 1)
        out = layernorm_modulate(q, *vectors[:2]), gated_residual(q, y, vectors[2])
        torch.autograd.backward(out, [torch.zeros_like(t) for t in out])
        low = [torch.zeros(*shape, dtype=dtype) for shape in ((64, 64), (channels, 64))]
        for factors in (low, (None, None)):
            y = low_rank_gelu(x[0, :, :channels].contiguous(), *factors)
            y.backward(torch.zeros_like(y))
        if not trained and ARCH >= 89:  # older ones have no numbers in fp8
            for width in (channels, 8 * channels if model == "FLUX" else 4 * channels):  # FLUX.2's widest input
                quantise_rows(torch.zeros(64, width, dtype=dtype))
        if not trained:
            dequantise_rows(torch.zeros(64, 4 * channels).to(FP8), torch.zeros(64, 1), dtype)
        every = model == "FLUX" and (dtype, vector_dtype) == VECTORS[0] and not FEW
        kinds = itertools.product((False, True), (-1, -2)) if every else [(False, -1)]
        for (per_pair, last), width, groups in itertools.product(kinds, (dim, channels), (1, 8)):
            alone = heads % groups or per_pair or last == -2 or dtype != vector_dtype
            if groups > 1 and alone:  # Ulysses 8, of FLUX and Wan
                continue
            weight = torch.zeros(width, dtype=dtype).requires_grad_(trained)
            table = torch.zeros(64, dim // 2 if per_pair else dim)
            heads_of = (t.unflatten(2, (heads, dim)) for t in (q, k))
            out = qk_norm_rope(*heads_of, weight, weight, table, table, use_real_unbind_dim=last, groups=groups)
            torch.autograd.backward(out, [torch.zeros_like(t) for t in out])


def table() -> None:
    """Print a row for each kernel of `blocks` that FLUX or Wan launch."""
    head = "kernel", "trained", "registers", "stack", "128-bit loads", "other loads", "128-bit stores", "other stores"
    print(*("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head))), sep="\n")
    for k in lines:
        fixed = k["fixed"]
        if fixed.get("PER_PAIR") or not fixed.get("INTERLEAVED", True) or not fixed.get("QUERIES", True):
            continue
        if fixed.get("GROUP") != fixed.get("H"):
            continue
        name = {"modulate": "layernorm_modulate", "residual": "gated_residual", "qk": "qk_norm_rope"}
        kernel = k["kernel"].removesuffix("_grad")
        text = name.get(kernel, kernel) + (", over all heads" if fixed.get("ACROSS") else "")
        text += ", backward" if kernel != k["kernel"] or fixed.get("GRAD") else ""
        wide = k["wide"]
        every = k["global"]
        cells = text, k["what"], k["reg"], k["stack"], wide[0], every[0] - wide[0], wide[1], every[1] - wide[1]
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    """Compile the kernels for one architecture."""
    target = GPUTarget("cuda", ARCH, 32)
    get = {"get_current_device": lambda: 0, "get_current_stream": lambda _: 0, "get_current_target": lambda: target}
    driver.set_active(SimpleNamespace(**get))
    _backend._select = lambda device, choice: "triton"
    if sys.argv[2] == "layouts":
        return layouts()
    about: dict = {}
    JITFunction.__getitem__ = lambda kernel, grid: partial(compile_instead, kernel, about)
    used = [(model, dtypes) for model, many in USED.items() for dtypes in many]
    for model, dtypes in used if sys.argv[2] == "all" else used[:1]:
        about |= {"numbers": "odd" if model == "odd" else "round", "dtypes": [str(d) for d in dtypes], "model": model}
        blocks(model, *dtypes, about)
    if sys.argv[2] == "table":
        table()
        return
    for numbers, size in NUMBERS.items():
        for dtypes in DTYPES[:1] if FEW else DTYPES if numbers == "round" else DTYPES[:2]:
            about |= {"numbers": numbers, "dtypes": [str(d) for d in dtypes]}
            latents(numbers, *dtypes)
        small(*size)
        if FEW:
            break


if __name__ == "__main__":
    main()

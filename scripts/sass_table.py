"""`python scripts/sass_table.py [CSRC]`: what nvcc makes of the kernels over latents on sm_90; needs no GPU.

Registers are those of the product; a spill is an error. Instructions per element are those of a kernel divided by a
thread's 8 elements, compiled with 128-bit accesses only: a full, aligned tile never takes the other path.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

TOOLS = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin"
TYPES = ("fp32", "bf16")
NOISE = ("no noise", "noise given", "noise drawn")
OTHERS = {"00": "", "10": ", KL", "01": ", Guard", "11": ", KL and Guard"}


def run(*command: object) -> str:
    """What a command prints."""
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


def compiled(csrc: Path) -> dict[tuple[str, ...], tuple[str, str]]:
    """(kernel, template arguments) → (resource usage, disassembly)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        run("nvcc", "-std=c++17", "-fmad=false", "-arch=sm_90", "-cubin", "-o", file.name, csrc / "sde_step.cu")
        usage = run(TOOLS / "cuobjdump", "-res-usage", file.name)
        code = run(TOOLS / "nvdisasm", "-c", file.name)
    parts = {re.match(r"\w+", part)[0]: part for part in re.split(r"(?m)^\s*\.section\s+\.text\.", code)[1:]}  # type: ignore[index]
    found = {}
    for name, used in re.findall(r"Function (\w+):\n(.*)", usage):
        kernel = re.search(r"(step|logp|grad|finish)_kernel(\w*?)EvNS", name)
        if kernel:
            key = (kernel[1], *re.findall(r"L[ib](\d)E", kernel[2]))
            found[key] = (used, parts[name])
    return found


def per_element(code: str) -> float:
    """Instructions for each of a thread's elements, if a block has one tile, as it has up to 4 million elements."""
    return len(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?!NOP)\S", code)) / 8


def title(key: tuple[str, ...]) -> tuple[str, str]:
    """(kernel, dtypes) in words."""
    kernel, *rest = key
    if kernel == "step":
        return f"step, {NOISE[int(rest[3])]}", ", ".join(TYPES[int(t)] for t in rest[:3])
    types = rest[:-2] if len(rest) == 5 else [*rest[:2], rest[0]]  # x' was once like x
    return kernel + OTHERS["".join(rest[-2:])], ", ".join(TYPES[int(t)] for t in types)


def main(csrc: Path) -> None:
    """Print the table."""
    product = compiled(csrc)
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(shutil.copytree(csrc, Path(folder) / "csrc"))
        text = (wide / "io.cuh").read_text()
        text = re.sub(r"if \(tile\.(full|is_wide\(q\)|left >= kTile)\)", "if (true)", text)
        (wide / "io.cuh").write_text(text)
        loops = compiled(wide)
    print("| kernel | x, v, x' | registers | blocks per SM | instructions per element |\n|---|---|---|---|---|")
    for key, (usage, _) in sorted(
        product.items(), key=lambda item: title(item[0]) if item[0][0] != "finish" else ("",)
    ):
        if key[0] != "finish":
            registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
            assert stack == 0, (key, "spills")
            blocks = min(16, 65536 // (-(-registers // 8) * 8 * 128))
            print(f"| {' | '.join(title(key))} | {registers} | {blocks} | {per_element(loops[key][1]):.0f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "csrc")

"""Report on the code nvcc generates for csrc/cuda_affine.cu: registers, spills, occupancy, wide accesses, ceilings.

    python scripts/sass_report.py [--arch 80 90a 100a] [--json FILE] [--source FILE]

Compiles one cubin per architecture, disassembles it and follows, in each kernel's control flow, the path with the most
128-bit accesses and the fewest instructions: a full, aligned tile of 8 elements per thread. `instructions` per element
is the length of that path at TILES tiles per thread. `ceiling` is the memory traffic, in TB/s, at which instruction
issue alone would saturate the named GPU (4 warp instructions per cycle and multiprocessor at its boost clock): an upper
bound, not a measurement. Needs nvcc and nvdisasm (from CUDA or the triton package), but no GPU.
"""

import argparse
import dataclasses
import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parent.parent / "csrc" / "cuda_affine.cu"
TILES = 2  # per thread, as at FLUX 1024²
VECTOR = 8  # elements per tile
BYTES = {"0": 4, "1": 2, "2": 2}
DTYPES = {"0": "fp32", "1": "bf16", "2": "fp16", "n1": "any"}
NOISE = {"0": "none", "1": "given", "2": "addressed"}


class Gpu(NamedTuple):
    """A GPU of an architecture; memory: the published bandwidth in TB/s."""

    name: str
    processors: int
    gigahertz: float
    memory: float

    def ceiling(self, instructions: float, traffic: int) -> float:
        """TB/s at `traffic` bytes and `instructions` per element."""
        return self.processors * 4 * 32 * self.gigahertz * traffic / instructions / 1000


GPUS = {
    "80": Gpu("A100 SXM", 108, 1.41, 2.039),
    "90a": Gpu("H100 SXM", 132, 1.98, 3.35),
    "100a": Gpu("B200", 148, 1.965, 8.0),
}


@dataclasses.dataclass
class Kernel:
    """One row of the report."""

    arch: str
    name: str
    registers: int
    spills: int
    """Bytes of stack frame, spill stores and spill loads, summed."""
    occupancy: float
    """Share of the 64 warps per multiprocessor that the registers allow."""
    wide_loads: int
    """Loads of 128 bits per tile."""
    wide_stores: int
    narrow_stores: int
    """Stores below 128 bits on the path of a whole, aligned tile; 0 if all are wide."""
    instructions: float
    """Instructions per element."""
    ceiling: float | None
    """TB/s; None if the template does not determine the traffic."""
    size: int
    """Bytes of code."""


class Block(NamedTuple):
    """A basic block: its instructions, and the indices of the blocks that may follow."""

    code: list[str]
    successors: list[int]


WIDE = re.compile(r"(LDG|STG)\.E\.(?:\w+\.)*(128|256)")


def blocks_of(lines: list[str]) -> list[Block]:
    """Control flow of one kernel's disassembly; block 0 is the entry."""
    start: dict[str, int] = {}
    code: list[list[str]] = [[]]
    for line in lines:
        if label := re.match(r"(\.L_x_\d+):", line):
            code.append([])
            start[label[1]] = len(code) - 1
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code[-1].append(found[1])
            if re.match(r"(@\S+ )?(BRA|EXIT|RET|CALL.*\.L_x_)", found[1]):
                code.append([])
    graph = []
    for k, words in enumerate(code):
        last = words[-1] if words else ""
        target = re.search(r"\b(?:BRA|CALL)\b.*`\((\.L_x_\d+)\)", last)
        unconditional = re.match(r"(BRA(\.\w+)* `|EXIT|RET|CALL)", last)
        successors = [start[target[1]]] if target and not last.startswith("BRA.DIV") else []
        graph.append(Block(words, successors + ([] if unconditional or k + 1 == len(code) else [k + 1])))
    return graph


def path_score(block: Block) -> tuple[int, int]:
    """(128-bit accesses, −instructions): the larger, the better the path."""
    return sum(bool(WIDE.search(w)) for w in block.code), -len(block.code)


def hot_path(graph: list[Block]) -> tuple[list[int], list[int]]:
    """Blocks of the best path from the entry to an exit, and of one further iteration of the loop on it."""
    sys.setrecursionlimit(10000)
    back: set[tuple[int, int]] = set()
    state = [0] * len(graph)  # 1: being visited, 2: done

    def visit(k: int) -> None:
        state[k] = 1
        for n in graph[k].successors:
            if state[n] == 1:
                back.add((k, n))
            elif state[n] == 0:
                visit(n)
        state[k] = 2

    visit(0)

    def best(goal: int | None) -> functools.cache:
        @functools.cache
        def walk(k: int) -> tuple[int, int, list[int]] | None:
            own_score = path_score(graph[k])
            ends = any(w.endswith(("EXIT", "RET")) for w in graph[k].code[-1:]) if goal is None else k == goal
            paths = [(0, 0, [])] if ends else []
            paths += [w for n in graph[k].successors if (k, n) not in back and (w := walk(n))] if k != goal else []
            if not paths:
                return None
            wide, length, path = max(paths, key=lambda w: w[:2])
            return wide + own_score[0], length + own_score[1], [k, *path]

        return walk

    path = best(None)(0)[2]
    iterations = [t for tail, head in back if head in path and (t := best(tail)(head))]
    iteration = max(iterations, key=lambda t: t[:2], default=(0, 0, []))
    return path, iteration[2] if iteration[0] else []


def describe(mangled: str) -> tuple[str, int | None]:
    """A kernel's readable name, and its traffic in bytes per element, if the template determines it."""
    name = re.search(r"\d([a-z]+)_kernel", mangled)[1]
    given = re.findall(r"L[ib](n?\d+)E", mangled)
    if name not in ("step", "logp", "grad") or len(given) < 2:
        return " ".join([name, *given]), None
    latent, velocity, noise = (*given, "")[:3] if name == "step" else (*given[:2], "")
    words = [name, f"x {DTYPES[latent]}", f"v {DTYPES[velocity]}", *([NOISE[noise]] if noise else ())]
    if latent == "n1":
        return " ".join(words), None
    traffic = 2 * BYTES[latent] + BYTES[velocity]
    if name == "grad":
        traffic += BYTES[velocity]
    return " ".join(words), traffic + (4 if noise == "1" else 0)


def run(*command: object) -> str:
    """The output of a command. Raises RuntimeError with it if the command fails."""
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}")
    return done.stdout


def nvdisasm() -> str:
    """Path of nvdisasm. Raises FileNotFoundError if neither CUDA nor triton provides it."""
    if found := shutil.which("nvdisasm"):
        return found
    for folder in sys.path:
        if (tool := Path(folder) / "triton/backends/nvidia/bin/nvdisasm").is_file():
            return str(tool)
    raise FileNotFoundError("nvdisasm: neither on PATH nor in the triton package")


def report(arch: str, source: Path = SOURCE) -> list[Kernel]:
    """The kernels of `source` for sm_`arch`."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "x.cubin"
        flags = ("-std=c++17", "-O3", "-fmad=false", f"-arch=sm_{arch}", "-Xptxas=-v")
        usage = run("nvcc", *flags, "-cubin", "-o", cubin, source)
        text = run(nvdisasm(), "-c", cubin)
    threads = int(re.search(r"kThreads = (\d+)", source.read_text())[1])
    kernels = []
    for part in re.split(r"(?m)^\s*\.section\s+(?=\.text\.)", text)[1:]:
        mangled = re.match(r"\.text\.(\w+)", part)[1]
        spills, registers = re.search(rf"'{mangled}'.*?\n(.*?)\n.*?Used (\d+) reg", usage, re.DOTALL).groups()
        graph = blocks_of(part.splitlines())
        path, iteration = ([w for k in blocks for w in graph[k].code] for blocks in hot_path(graph))
        iteration = iteration or path  # without a loop the tiles are unrolled
        unrolled = TILES if iteration is path else 1
        count = (len(path) + (0 if iteration is path else (TILES - 1) * len(iteration))) / (TILES * VECTOR)
        stores = [w for w in iteration if "STG" in w]
        wide = [m[1] for w in iteration if (m := WIDE.search(w))]
        name, traffic = describe(mangled)
        kernels.append(
            Kernel(
                arch,
                name,
                int(registers),
                sum(map(int, re.findall(r"(\d+) bytes", spills))),
                min(65536 // (-(-int(registers) // 8) * 8 * threads), 2048 // threads) * threads / 2048,
                wide.count("LDG") // unrolled,
                wide.count("STG") // unrolled,
                sum(not WIDE.search(w) for w in stores),
                round(count, 1),
                None if traffic is None else round(GPUS[arch].ceiling(count, traffic), 2),
                16 * sum(len(b.code) for b in graph),
            )
        )
    return sorted(kernels, key=lambda k: k.name)


def main() -> None:
    """Print the table, one row per kernel and architecture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--source", type=Path, default=SOURCE)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    rows = [dataclasses.asdict(k) for arch in args.arch for k in report(arch, args.source)]
    names = [f.name for f in dataclasses.fields(Kernel)]
    table = [names, *([str("" if row[n] is None else row[n]) for n in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
    if args.json:
        args.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()

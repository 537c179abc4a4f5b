"""`python -m benchmarks.bench_judge [--vllm ENVIRONMENT]`: the judge client's speed.

One group of 9 noisy 512² images, each of its 36 pairs once: pairs per second, CPU time of the client, and image bytes
sent, with a server that answers immediately (so that the client is the bottleneck) and with a real vLLM that serves the
tiny judge on this CPU. Every round has new images. Writes results/judge_cpu.json and the table in docs/science.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from benchmarks.blocks import replace_block, rounded, write_json
from benchmarks.harness import cpu_name
from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.media import Media
from prefgrpo.judge.client import HttpJudge
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.pairs import VlmPairwise, round_robin

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "judge_cpu.json"
DOCUMENT = ROOT / "docs" / "science.md"
JUDGE = ROOT / "prefgrpo" / "tiny" / "assets" / "judge"
TEMPLATE = "caption_match"
PROMPT = "a red circle on the left"
SIZE = 9
SIDE = 512


def photo(rng: np.random.Generator, side: int = SIDE) -> Media:
    """An image of large soft shapes and sensor noise: about 110 kB as JPEG of quality 95 at 512²."""
    soft = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize((side, side), Image.BICUBIC)
    noise = rng.normal(0, 10.0, (side, side, 3))
    pixels = np.asarray(soft.filter(ImageFilter.GaussianBlur(4)), np.float64) + noise
    return Media(pixels.clip(0, 255).astype(np.uint8))


@contextmanager
def server(command: Sequence[str], port: int, seconds: float) -> Iterator[str]:
    """Address of a server process that runs inside the block, once it is healthy."""
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + seconds
    with subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, cwd=ROOT) as running:
        try:
            while not healthy(url):
                if running.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)} is not ready")
                time.sleep(0.1)
            yield url
        finally:
            running.terminate()
            running.wait(60)


def echo_server(*options: str) -> AbstractContextManager[str]:
    """Address of an echo server in a separate process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return server([sys.executable, "-m", "benchmarks.echo_server", *options], port, 20)


def vllm_server(environment: str, port: int) -> AbstractContextManager[str]:
    """Address of a vLLM server with the tiny judge on the CPU."""
    command = [sys.executable, "-m", "prefgrpo", "judge", "serve", str(JUDGE), "--cpu"]
    return server([*command, "--vllm", environment, "--max-model-len", "2048"], port, 300)


def healthy(url: str) -> bool:
    """Whether a server's /health answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def measure(url: str, model: str, rounds: int, size: int = SIZE, side: int = SIDE) -> dict[str, Any]:
    """Pairs per second and client CPU time per group of new images; the first round is a warm-up."""
    judge = VlmPairwise(HttpJudge(JudgeConfig((url,), model)), TEMPLATE)
    pairs = round_robin(size, 0)
    rng = np.random.default_rng(0)
    wall: list[float] = []
    cpu: list[float] = []
    for _ in range(rounds + 1):
        samples = [Sample(PROMPT, photo(rng, side)) for _ in range(size)]
        start = time.perf_counter()
        busy = time.process_time()
        answers = judge.ask([(samples[i], samples[j]) for i, j in pairs])
        answered = sum(answer.value is not None for answer in answers)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
        if answered != len(pairs):
            raise RuntimeError(f"{answered} of {len(pairs)} pairs were answered")
    low, middle, high = statistics.quantiles([len(pairs) / s for s in wall[1:]], n=4)
    found = {"pairs_per_s": middle, "pairs_per_s_quartiles": [low, high]}
    return rounded(found | {"rounds": rounds, "client_ms_per_pair": 1e3 * statistics.median(cpu[1:]) / len(pairs)})


def picture_bytes(size: int, side: int) -> int:
    """Bytes of base64 sent per group."""
    rng = np.random.default_rng(1)
    with echo_server("--count") as url:
        judge = VlmPairwise(HttpJudge(JudgeConfig((url,), "echo")), TEMPLATE, plan="round_robin")
        judge.score([Sample(PROMPT, photo(rng, side)) for _ in range(size)])
        with urllib.request.urlopen(f"{url}/counts") as reply:
            return int(json.load(reply)["image_bytes"])


def machine() -> dict[str, Any]:
    """The machine of the measurement."""
    libraries = {name: version(name) for name in ("aiohttp", "pillow", "numpy")}
    load = rounded(os.getloadavg()[0])
    python = platform.python_version()
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "load": load, "python": python} | libraries


def table(found: dict[str, Any]) -> list[str]:
    """The block of docs/science.md."""
    m = found["machine"]
    lines = [
        f"{m['cpu']}, {m['cores']} cores shared with other work (load {m['load']:.1f} at the start), Python "
        f"{m['python']}, aiohttp {m['aiohttp']}"
        + (f", vLLM {found['vllm_version']}" if "vllm_version" in found else "")
        + f"; {found['image_bytes'] / 1e6:.2f} MB of images sent per group.",
        "",
        "| server | pairs/s (quartiles) | client CPU per pair |",
        "|---" * 3 + "|",
    ]
    for server in ("echo", "vllm"):
        if server in found:
            row = found[server]
            low, high = row["pairs_per_s_quartiles"]
            speed = f"{row['pairs_per_s']:.0f} ({low:.0f}-{high:.0f})"
            lines.append(f"| {server} | {speed} | {row['client_ms_per_pair']:.2f} ms |")
    return lines


def vllm_version(environment: str) -> str:
    """Version of the vLLM in an environment."""
    python = Path(environment) / "bin" / "python"
    code = "from importlib.metadata import version; print(version('vllm'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_judge", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--vllm", default=os.environ.get("PREFGRPO_VLLM", ""), help="environment that has vLLM")
    parser.add_argument("--port", type=int, default=8917)
    parser.add_argument("--render", action="store_true", help="only write the table from the JSON")
    args = parser.parse_args(argv)
    if not args.render:
        found: dict[str, Any] = {"machine": machine(), "group": SIZE, "side": SIDE}
        found["image_bytes"] = picture_bytes(SIZE, SIDE)
        with echo_server() as url:
            found["echo"] = measure(url, "echo", args.rounds)
        if args.vllm:
            found["vllm_version"] = vllm_version(args.vllm)
            with vllm_server(args.vllm, args.port) as url:
                found["vllm"] = measure(url, "judge", args.rounds)
        write_json(RESULTS, found)
    found = json.loads(RESULTS.read_text())
    replace_block(DOCUMENT, "client", table(found))
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()

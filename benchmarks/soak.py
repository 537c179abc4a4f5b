"""`python -m benchmarks.soak [--minutes 30] [--processes 2]`: checks a run for memory and file descriptor leaks.

Trains the demo's pipeline under torchrun, judged over HTTP by a server in a separate process, with an
evaluation and a checkpoint every few steps, and reads every process's resident memory and open file descriptors twice a
second. Prints for each process the first and last values, and the least-squares slope after the first quarter of the
time. At the end the run gets SIGTERM, and must save and exit with status 3.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from benchmarks.bench_judge import ROOT, echo_server
from benchmarks.bench_overlap import demo
from prefgrpo.config.loading import to_dict

EVERY = 5
"""Steps between evaluations, and between checkpoints."""


def recipe(url: str, folder: Path) -> Path:
    """An endless run of the demo's pipeline."""
    over = {"name": "soak", "train": {"steps": 10**6}, "checkpoint": {"every": EVERY}}
    config = demo(url, str(folder), 4, 8, 32, **over, eval={"every": EVERY, "max_prompts": 4})
    file = folder / "soak.yaml"
    file.write_text(yaml.safe_dump(to_dict(config)))
    return file


def children(parent: int) -> list[int]:
    """The child processes of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return sorted(found)


def sample(process: int) -> tuple[float, int]:
    """(resident MiB, open descriptors) of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{process}/fd"))


def steps(folder: Path) -> int:
    """Number of training steps that a run has logged."""
    log = folder / "soak" / "metrics.jsonl"
    return log.read_text().count('"kind": "train"') if log.is_file() else 0


def measure(folder: Path, seconds: float, processes: int) -> list[str]:
    """One line per process. Raises RuntimeError if the run ends early, or does not save and exit as expected."""
    with echo_server() as url:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [*torchrun, "-m", "prefgrpo", "train", str(recipe(url, folder))]
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while steps(folder) < EVERY + 1:  # until everything has run once
            if run.poll() is not None:
                raise RuntimeError(f"the run ended with {run.returncode}")
            time.sleep(0.5)
        workers, begin, first = children(run.pid), time.monotonic(), steps(folder)
        table = list[list[float]]()
        while time.monotonic() - begin < seconds:
            if run.poll() is not None:
                raise RuntimeError(f"the run ended with {run.returncode}")
            table.append([time.monotonic() - begin, *(value for worker in workers for value in sample(worker))])
            time.sleep(0.5)
        done = steps(folder) - first
        run.send_signal(signal.SIGTERM)
        run.wait()
        if not any((folder / "soak" / "checkpoints").iterdir()):
            raise RuntimeError("expected a checkpoint after SIGTERM, there is none")
    values = np.array(table)
    late = values[values[:, 0] > seconds / 4]
    lines = [f"{done} steps in {seconds / 60:.1f} minutes"]
    for k in range(len(workers)):
        memory, files = late[:, 1 + 2 * k], late[:, 2 + 2 * k]
        slope = np.polyfit(late[:, 0] / 60, memory, 1)[0]
        lines.append(
            f"process {k}: {memory[0]:.0f} → {memory[-1]:.0f} MiB ({slope:+.2f} MiB per minute), "
            f"{files[0]:.0f} → {files[-1]:.0f} descriptors (at most {files.max():.0f})"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        print(*measure(Path(folder), given.minutes * 60, given.processes), sep="\n")


if __name__ == "__main__":
    main()

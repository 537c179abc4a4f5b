"""Two torchrun agents with one process each, started as in docs/scale.md, against one agent with two processes.

Why these cases: a multi-node run differs from a single-node run only in who starts the processes and how they find each
other. Named rendezvous and fixed node ranks must give the same metrics. After a failure on one node, all must find each
other again, although only that node has counted a restart.
"""

import subprocess
import sys

import pytest
from ranks import all_end, environment, free_port, ranks
from world import recipe, rows, tiny_world, weights

pytestmark = [pytest.mark.dist, pytest.mark.full]


def by_name(node: int, port: str) -> list[str]:
    """The options from docs/scale.md, plus the address, as a test machine's host name may not resolve."""
    meeting = ["--rdzv_backend", "c10d", "--rdzv_id", "wan", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    return [*meeting, "--local_addr", "127.0.0.1"]


def by_rank(node: int, port: str) -> list[str]:
    """The options for explicit ranks."""
    return ["--node_rank", str(node), "--master_addr", "127.0.0.1", "--master_port", port]


def test_two_agents_are_one_with_two_processes(tmp_path):
    place = tiny_world(tmp_path)
    all_end(ranks(recipe(place, "together"), 2))
    truth = place / "runs" / "together"
    for way in (by_name, by_rank):
        name, port = way.__name__, str(free_port())
        file, logs = recipe(place, name), [place / f"{name}{node}.log" for node in range(2)]
        agents = []
        for node, log in enumerate(logs):
            with log.open("w") as to:
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
                command = [*torchrun, *way(node, port), "-m", "prefgrpo", "train", str(file)]
                agents.append(subprocess.Popen(command, stdout=to, stderr=to, env=environment()))
        ended, outputs = [agent.wait(600) for agent in agents], [log.read_text() for log in logs]
        assert ended == [0, 0], outputs
        run = place / "runs" / name
        assert rows(run) == rows(truth) and weights(run) == weights(truth), way
        assert sum(output.count("finished after 4 steps") for output in outputs) == 1, outputs
        assert "on 2 × cpu" in "".join(outputs)


RESTARTED = """
import os, pathlib, time
from prefgrpo.parallel import world
folder = pathlib.Path(os.environ["PLACE"])
first = not (folder / "failed").exists()
joined = world.join()
if first and os.environ["NODE"] == "1":
    (folder / "failed").touch()
    os._exit(1)
if first:
    time.sleep(600)
(folder / os.environ["NODE"]).write_text(str(joined.any(world.restart_count() > 0)))
"""
"""Joins twice. In the first start, the process of node 1 dies while that of node 0 waits, as in an NCCL collective."""


def test_a_failure_on_one_node_restarts_both_into_one_group(tmp_path):
    """torchrun counts the restart only on the node whose process failed; on the other it is a change of members."""
    script = tmp_path / "script.py"
    port = str(free_port())
    script.write_text(RESTARTED)
    agents = []
    for node in range(2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
        command = [*torchrun, "--max-restarts", "1", "--monitor_interval", "0.2", *by_name(node, port), str(script)]
        variables = environment(PLACE=str(tmp_path), NODE=str(node))
        with (tmp_path / f"{node}.log").open("w") as to:
            agents.append(subprocess.Popen(command, stdout=to, stderr=to, env=variables))
    try:
        assert [agent.wait(120) for agent in agents] == [0, 0], [(tmp_path / f"{n}.log").read_text() for n in range(2)]
    finally:
        for agent in agents:
            agent.terminate()
    assert [(tmp_path / str(node)).read_text() for node in range(2)] == ["True", "True"]

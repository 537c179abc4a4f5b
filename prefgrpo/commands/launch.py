"""`prefgrpo launch`: torchrun, with the exit code of the run instead of torchrun's own 1 and its traceback.

Invariant: the command ends with the code of the process that failed first (2 nothing was started, 3 stopped with a
resumable checkpoint), so that a script can tell a run to be resumed from one to be mended.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

WAIT_S = 60.0
"""Longest that a process which failed waits for the first one of its machine to speak."""
SAVE_S = 600
"""Torchrun's --shutdown-timeout: after a signal, time to finish a step and to save it."""
CAUSE_S = 20.0
"""Longest that a process whose collective failed waits for torchrun to see which other one has ended."""


def launch(argv: Sequence[str]) -> int:
    """`prefgrpo launch [torchrun's options] COMMAND …`, e.g. `prefgrpo launch --nproc_per_node 8 train RECIPE`."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    parser = get_args_parser()
    parser.prog = "prefgrpo launch"
    args = parser.parse_args(["--module", *argv])
    if args.shutdown_timeout is None:
        args.shutdown_timeout = SAVE_S
    args.training_script, args.training_script_args = "prefgrpo", [args.training_script, *args.training_script_args]
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # a shared one keeps addresses over --max-restarts
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failed process has said why
    try:
        run(args)
    except SignalException as error:
        print(f"ended by {error.sigval.name}; continue with the same command and --resume", file=sys.stderr)
        return 3
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode not in (2, 3):
            print(f"error: process {rank} ended with code {first.exitcode}", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0


def speaks() -> bool:
    """Whether this process tells what is wrong: under torchrun, which starts several, local rank 0 does."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"


def wait_for_first(code: int) -> None:
    """Called before ending with `code`. torchrun ends all processes as soon as one fails: let local rank 0 speak first.

    In the others, ends the process with `code` when torchrun does so because local rank 0 has ended, or returns after
    WAIT_S: the trouble is this process's alone.
    """
    if not speaks():
        _wait_for_torchrun(code, WAIT_S)


def wait_for_cause(error: Exception) -> None:
    """Called before ending with a traceback: if it is only that of another process's end, torchrun ends this one too,
    without it. Returns after CAUSE_S, as on a machine whose own processes are all there."""
    from prefgrpo.parallel.world import follows
    from prefgrpo.run.session import Interrupt

    if "TORCHELASTIC_RUN_ID" in os.environ and follows(error):
        if Interrupt.ever:  # torchrun has said so already
            os._exit(1)
        _wait_for_torchrun(1, CAUSE_S)


def _wait_for_torchrun(code: int, seconds: float) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(seconds)

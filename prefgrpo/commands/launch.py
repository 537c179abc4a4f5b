"""`prefgrpo launch`: torchrun, but with the run's exit code instead of torchrun's own 1 and its traceback.

Invariant: the exit code is that of the process that failed first (2: nothing was started, 3: stopped with a resumable
checkpoint), so that a script can distinguish a run to resume from one to fix.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

WAIT_S = 8.0
"""Maximum seconds that a failed process waits for local rank 0 to report the same error, plus half a second per local
rank; less than CAUSE_S, so that an error of this process alone is reported by it."""
SAVE_S = 600
"""torchrun's --shutdown-timeout: seconds after a signal to finish and save a step."""
CAUSE_S = 20.0
"""Maximum seconds that a process whose collective failed waits for torchrun to notice which other one has ended."""


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
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # shared, it keeps addresses across --max-restarts
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failed process has reported why
    try:
        run(args)
    except SignalException as error:
        print(f"ended by {error.sigval.name}; continue with the same command and --resume", file=sys.stderr)
        return 3
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode not in (2, 3):
            print(f"error: process {rank} exited with code {first.exitcode}", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0


def reports_errors() -> bool:
    """Whether this process reports errors: under torchrun, which starts several, only local rank 0 does."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"


def wait_for_first(code: int) -> None:
    """Call before exiting with `code`: torchrun ends all processes when one fails, so local rank 0 must report first.

    On other ranks, exits with `code` when torchrun sends SIGTERM because another process has ended, or returns after
    about WAIT_S, if only this process has failed.
    """
    if not reports_errors():
        _wait_for_torchrun(code, WAIT_S + int(os.environ["LOCAL_RANK"]) / 2)


def wait_for_cause(error: Exception) -> None:
    """Call before exiting with a traceback. If the error only follows from another process's end, waits for torchrun to
    end this process, without a traceback; returns after CAUSE_S, e.g. if no process of this machine has ended."""
    from prefgrpo.parallel.world import is_peer_failure
    from prefgrpo.run.session import Interrupt

    if "TORCHELASTIC_RUN_ID" in os.environ and is_peer_failure(error):
        if Interrupt.ever:  # torchrun has reported it already
            os._exit(1)
        _wait_for_torchrun(1, CAUSE_S)


def _wait_for_torchrun(code: int, seconds: float) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(seconds)

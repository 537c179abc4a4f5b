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


def launch(argv: Sequence[str]) -> int:
    """`prefgrpo launch [torchrun's options] COMMAND …`, e.g. `prefgrpo launch --nproc_per_node 8 train RECIPE`."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    parser = get_args_parser()
    parser.prog = "prefgrpo launch"
    args = parser.parse_args(["--module", *argv])
    args.training_script, args.training_script_args = "prefgrpo", [args.training_script, *args.training_script_args]
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failed process has said why
    try:
        run(args)
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
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(WAIT_S)

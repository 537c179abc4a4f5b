"""The `prefgrpo` command, also available as `python -m prefgrpo …` for torchrun."""

import faulthandler
import io
import os
import sys
from typing import Any


class _Lasting(io.FileIO):
    """A descriptor whose reader may go away (a closed pipe or terminal): what is written from then on is discarded."""

    def write(self, data: Any, /) -> int:
        """As of FileIO, without its OSError."""
        try:
            return super().write(data) or 0
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def _keep_streams() -> None:
    """From now on, nothing that is printed raises OSError."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # the shell closed it
            stream = open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)  # noqa: SIM115
        binary = io.BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False))
        lines = stream.line_buffering or stream.write_through
        setattr(sys, name, io.TextIOWrapper(binary, stream.encoding, stream.errors, line_buffering=lines))


def _let_segments_grow() -> None:
    """Let torch's allocator grow its segments: prompts differ in length, and segments of fixed size that a longer one
    cannot reuse end in OutOfMemoryError on a nearly full GPU. A user's own setting is kept."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # read at the first allocation


def main() -> int:
    """Run the command line; if only the ops are installed, print which package is missing."""
    if sys.argv[1:2] in (["train"], ["demo"]):  # not judge serve: vLLM shares memory with CUDA's IPC
        _keep_streams()
        _let_segments_grow()
    faulthandler.enable()  # a crash in native code prints every thread's Python stack
    try:
        from prefgrpo.commands.cli import main as run
    except ModuleNotFoundError as error:
        if str(error.name).startswith("prefgrpo"):
            raise
        print(
            f"error: the prefgrpo command needs {error.name}, which is not installed: pip install -e '.[train]' in the "
            "checkout (or '.[judge]' for the judges alone); without extras only prefgrpo.ops is available",
            file=sys.stderr,
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())

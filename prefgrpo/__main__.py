"""The `prefgrpo` command, also available as `python -m prefgrpo …` for torchrun."""

import faulthandler
import sys


def main() -> int:
    """Run the command line; if only the ops are installed, print which package is missing."""
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

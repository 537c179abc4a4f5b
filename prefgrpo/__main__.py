"""The `prefgrpo` command, and `python -m prefgrpo …`, the same, for torchrun."""

import sys


def main() -> int:
    """Run the command line; where only the ops are installed, say what it needs."""
    try:
        from prefgrpo.commands.cli import main as run
    except ModuleNotFoundError as error:
        if str(error.name).startswith("prefgrpo"):
            raise
        print(
            f"error: the prefgrpo command needs {error.name}, which is not installed: pip install 'prefgrpo[train]' "
            "(or [judge] for the judges alone); without extras there is prefgrpo.ops",
            file=sys.stderr,
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())

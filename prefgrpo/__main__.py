"""`python -m prefgrpo …`, the same as the `prefgrpo` command; for torchrun."""

import sys

from prefgrpo.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())

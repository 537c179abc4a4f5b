"""`python -m prefgrpo …`, the same as the `prefgrpo` command; for torchrun."""

import sys

from prefgrpo.cli import main

if __name__ == "__main__":
    sys.exit(main())

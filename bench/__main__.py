"""The command `bench`, and `python -m bench`."""

import sys

from bench.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())

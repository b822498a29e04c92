"""Run the command line: `python -m hookdrop`."""

import sys

from hookdrop.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Run `python -m ncclsync`; see `tools/cli.py`."""

import sys

from ncclsync.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())

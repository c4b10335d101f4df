"""`python -m ncclsync`; see `cli`."""

import sys

from ncclsync.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Run `python -m ncclsync ARGUMENTS` in each process, with variables of its own.

Arguments: {"RANK": {"NAME": "value"}} as JSON, then those of the command.
"""

import json
import os
import sys

variables, *arguments = sys.argv[1:]
os.environ |= json.loads(variables).get(os.environ["OMPI_COMM_WORLD_RANK"], {})

from ncclsync.tools.cli import main  # noqa: E402 - reads the variables

sys.exit(main(arguments))

"""Programs whose rows pass ops that hide them: `row_programs` has them."""

from costs import row, runs
from row_programs import PROGRAMS

PYTHON = "Python gets one device's batch"
INHERENT = {"numpy function": {"PyFunc": PYTHON}, "py function": {"EagerPyFunc": PYTHON}}
INHERENT["texts by characters"] = {"UnicodeEncode": "open: a character's string has splits of all characters"}
for name, program in PROGRAMS.items():
    row(f"again: {name}", runs(program.make, program.batch), INHERENT.get(name))

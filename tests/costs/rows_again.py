"""Programs whose rows pass ops that hide them: `row_programs` has them."""

from costs import row, runs
from row_programs import PROGRAMS

PYTHON = "Python gets one device's batch"
INHERENT = {"numpy function": {"PyFunc": PYTHON}, "py function": {"EagerPyFunc": PYTHON}}
SPLIT = "open: the splits of characters' strings are those of all characters"
INHERENT["texts by characters"] = dict.fromkeys(
    ("UnicodeEncode", "Equal", "LookupTableFindV2", "RaggedTensorToTensor", "SelectV2"), SPLIT
)
INHERENT["bags with weights"] = dict.fromkeys(
    ("Unique", "GatherV2", "StridedSlice"), "what the batch has once is looked up once for all"
)
INHERENT["lengths up to two limits"] = {"PyFunc": PYTHON} | dict.fromkeys(
    ("Mul", "Sum"), "what Python gives of some rows is no tower's"
)
for name, program in PROGRAMS.items():
    row(f"again: {name}", runs(program.make, program.batch), INHERENT.get(name))

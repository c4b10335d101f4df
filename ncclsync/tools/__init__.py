"""Serve the command line: `python -m ncclsync`.

`cli` hands the arguments to a command's package, whose `commands` parses them: `verify/` compares a model on towers
with one device, `doctor/` examines a machine, `bench/` measures, `plan/` predicts steps on more GPUs, `run/` starts a
script again that has died. Several commands share `factories`, which imports the model named on the command line,
`arguments`, and `processes`, which joins the processes that a launcher has started.
"""

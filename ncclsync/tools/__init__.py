"""Serve the command line: `python -m ncclsync`.

`cli` parses the arguments, and hands them to a command's package: `verify/` compares a model on towers with one device,
`doctor/` examines a machine, `bench/` measures, `plan/` predicts steps on more GPUs, `run/` starts a script again that
has died. `factories` imports the model named on the command line; `arguments` parses what several commands
take; `processes` joins the processes that a launcher has started.
"""

"""Run `python -m ncclsync bench`: figures of ncclsync beside other libraries, measured in turns.

`commands` says what can be asked for; `all_reduce` and `training` drive processes, each a `worker`
that runs `reducers`, `ranks` or `fit`; `results` and `plot` show what was found.
"""

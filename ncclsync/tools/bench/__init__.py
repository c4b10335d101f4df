"""Run `python -m ncclsync bench`: figures of ncclsync beside other libraries, measured in turns.

`commands` parses the arguments; `all_reduce` and `training` drive processes, each a `worker` that runs `reducers`,
`ranks` or `fit`; `results` and `plot` show the figures.
"""

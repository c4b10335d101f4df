"""Run `python -m ncclsync bench`: figures of ncclsync beside other libraries, measured in turns.

`commands` parses the arguments; `all_reduce` and `training` drive processes, each a `worker` that runs a reducer or
`fit`; `on_gpus` measures in this process; `results` and `plot` show the figures. A benchmark, `bench_NAME`, is a
function of the parsed options (see `commands`) and of a function that reports progress. It returns a `Result`, None if
another process has it, or raises a `BenchError` if it cannot be run, such as where a process has failed.
"""

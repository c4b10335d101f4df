"""Run `python -m ncclsync bench`: figures of ncclsync beside other libraries, measured in turns.

`commands` parses the arguments; `training` drives processes, each a `worker`; `on_gpus` and `all_reduce` measure in
this process, the latter MPI in others; `results` shows the figures. A benchmark, `bench_NAME`, is a function of the
parsed options. It returns a `Result`, or raises a `BenchError` if it cannot be run, as where a process failed.
"""

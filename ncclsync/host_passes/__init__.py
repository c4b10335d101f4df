"""Make a finished program cheaper where all towers share the host's memory; `improve` is the one entry.

Three things, with bitwise the same results but for the order of a sum. Buckets travel unpacked, by a C op
(`direct.py`). An optimizer's updates run as one op for many variables (`fusion.py`), and so do chains of
element-wise ops (`chains.py`). Without this package CPU towers run the very program that GPUs run.
"""

from ncclsync.host_passes.passes import improve as improve

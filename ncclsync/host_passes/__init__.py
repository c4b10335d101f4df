"""Make a finished program cheaper for towers that share the host's memory; `improve` is the only entry.

Buckets travel unpacked, by a C op (`direct.py`). Chains of element-wise ops run as one, with the same bits
(`chains.py`). Without this package CPU towers run the program that GPUs run.
"""

from ncclsync.host_passes.passes import improve as improve

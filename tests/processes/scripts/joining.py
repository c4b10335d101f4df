"""Join two processes, or fail to, in the way that the argument names; print what each process comes to know."""

import os
import subprocess
import sys
import time

from telling import told

import ncclsync

WAY = sys.argv[1]
RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])


if WAY == "secrets":
    os.environ["NCCLSYNC_SECRET"] = f"the secret of process {RANK}"
    told(lambda: ncclsync.Towers(1, health=ncclsync.Health(timeout_s=20)))
if WAY == "child":
    towers = ncclsync.Towers(1, health=ncclsync.Health(timeout_s=20))
    # As a helper script, or a spawned worker that imports the training script.
    subprocess.run([sys.executable, __file__, "helper"], timeout=120, check=True)
    subprocess.run([sys.executable, __file__, "helper apart"], timeout=120, check=True)
    print(f"[{RANK}] towers {len(towers)}, divergence {towers.divergence()}", flush=True)
if WAY == "helper":
    told(lambda: ncclsync.Towers(1, health=ncclsync.Health(timeout_s=20)))
if WAY == "helper apart":
    print(f"[{RANK}] apart {len(ncclsync.Towers(1, processes=False))}", flush=True)
if WAY in ("late", "late first"):
    if (0 if WAY == "late first" else 1) == RANK:
        time.sleep(60)
    told(lambda: ncclsync.Towers(1, health=ncclsync.Health(timeout_s=4)))
    os._exit(1)  # so that mpirun ends the other

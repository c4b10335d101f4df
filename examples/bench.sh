#!/bin/sh
# Writes figures like those of ncclsync/tools/README.md, which has their commands: half an hour on a quiet machine of 2 cores.
# Compares with MPI too if mpi4py and mpirun are installed.
#
#     sh examples/bench.sh FOLDER
set -eu
folder=${1:-.}
python -m ncclsync bench all-reduce --json "$folder/all-reduce.json"
python -m ncclsync bench step --against mirrored,single,shard,sharded --json "$folder/step.json"
python -m ncclsync bench start --json "$folder/start.json"
python -m ncclsync bench feed --model mlp,cnn --json "$folder/feed.json"
python -m ncclsync bench memory --json "$folder/memory.json"

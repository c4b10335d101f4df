#!/bin/sh
# Draws figures like those of ncclsync/tools/README.md, which has their commands: half an hour on a quiet machine of 2 cores.
# Needs matplotlib; compares with MPI too if mpi4py and mpirun are installed.
#
#     sh examples/bench.sh FOLDER
set -eu
folder=${1:-.}
python -m ncclsync bench all-reduce --json "$folder/all-reduce.json" --plot "$folder/all-reduce.png"
python -m ncclsync bench step --against mirrored,single,shard,sharded --json "$folder/step.json" --plot "$folder/step.png"
python -m ncclsync bench start --json "$folder/start.json" --plot "$folder/start.png"
python -m ncclsync bench feed --model mlp,cnn --json "$folder/feed.json" --plot "$folder/feed.png"
python -m ncclsync bench memory --json "$folder/memory.json" --plot "$folder/memory.png"

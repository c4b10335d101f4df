"""Average arrays over the GPUs of several hosts, one process on each, by NCCL alone.

The page is more_than_one_host.md. Needs CuPy, and a folder that all hosts see.

    python more_than_one_host.py --hosts 2 --host 0 --gpus 8 --folder /shared/run  # on the first host
    python more_than_one_host.py --hosts 2 --host 1 --gpus 8 --folder /shared/run  # on the second
"""

import argparse
import pathlib
import time

import cupy

from ncclsync.communicator import NcclCommunicator


def exchange_id(host: int, folder: pathlib.Path) -> bytes:
    """Return the id by which processes find each other: host 0 makes it, the others read it."""
    path = folder / "unique_id"
    if host == 0:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(NcclCommunicator.unique_id())
        unfinished.rename(path)  # whole, or not there
    while not path.exists():
        time.sleep(0.1)
    return path.read_bytes()


def main() -> None:
    """Join, and let each rank send its number."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--host", type=int, required=True, help="which one this is, from 0")
    parser.add_argument("--gpus", type=int, required=True, help="of each host")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="new for each run")
    options = parser.parse_args()

    devices = range(options.gpus)
    ranks = [options.host * options.gpus + device for device in devices]
    unique_id = exchange_id(options.host, options.folder)
    world_size = options.hosts * options.gpus
    with NcclCommunicator.from_unique_id(unique_id, world_size, ranks, devices) as communicator:
        sends, recvs = [], []
        for rank, device in zip(ranks, devices, strict=True):
            with cupy.cuda.Device(device):
                sends.append(cupy.full(1_000_000, rank, "float32"))
                recvs.append(cupy.empty(1_000_000, "float32"))
        communicator.all_reduce(sends, recvs, op="avg")
        for rank, received in zip(ranks, recvs, strict=True):
            print(f"rank {rank} of {world_size}: {float(received[0])}")


if __name__ == "__main__":
    main()

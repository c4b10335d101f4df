"""Start a training program on the hosts of a Ray cluster: a worker on each, which drives all GPUs of its host.

    python ray_cluster.py several_hosts.py --hosts 2 --gpus 8

Needs Ray, on all hosts, and the program at the same path there. It is started unchanged: the variables that torchrun
would set tell ncclsync that the process is one of several.
"""

import argparse
import os
import pathlib
import runpy
import secrets
import socket
import sys


class Address:
    """Keep a port of this host for process 0: nobody else gets it before that process listens there."""

    def __init__(self) -> None:
        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # who says so, too, may listen at it
        self._kept.bind(("", 0))

    def get(self) -> tuple[str, int]:
        """Return the address by which the other hosts reach this one, and the port."""
        import ray

        return ray.util.get_node_ip_address(), self._kept.getsockname()[1]


def variables_of(rank: int, size: int, address: tuple[str, int], secret: str) -> dict[str, str]:
    """Return what a launcher tells process `rank` of `size`, each alone on its host."""
    host, port = address
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "NCCLSYNC_SECRET": secret,
    }


def run_program(program: str, variables: dict[str, str]) -> None:
    """Run a program in this process, as if it had been started so."""
    os.environ.update(variables)
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")


def main() -> None:
    """Reserve the hosts, and run the program on all of them."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="of each host")
    options = parser.parse_args()

    ray.init()
    bundles = [{"CPU": 1, "GPU": options.gpus}] * options.hosts
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on_host(function_or_class, rank, **resources):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        return ray.remote(scheduling_strategy=strategy, **resources)(function_or_class)

    keeper = on_host(Address, 0, num_cpus=0).remote()  # until the workers have ended
    address = ray.get(keeper.get.remote())
    secret = secrets.token_hex(32)  # Ray's actors alone get it
    program = str(options.program.resolve())
    workers = [
        on_host(run_program, rank, num_gpus=options.gpus, max_calls=1).remote(
            program, variables_of(rank, options.hosts, address, secret)
        )
        for rank in range(options.hosts)
    ]
    ray.get(workers)  # raises what a worker has raised


if __name__ == "__main__":
    main()

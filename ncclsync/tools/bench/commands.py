"""Parse the arguments of `python -m ncclsync bench`, run a benchmark, and print its result.

The benchmarks stand in `bench.all_reduce`, `.on_gpus` and `.training`. Nothing here imports TensorFlow.
"""

import argparse
import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

from ncclsync.communicator.processes import find_process
from ncclsync.errors import NcclSyncError
from ncclsync.tools.arguments import Option, add_options, at_least, file, link, listed, number, option, switch
from ncclsync.tools.bench import training
from ncclsync.tools.bench.results import check_json, show
from ncclsync.tools.bench.turns import BenchError, progress
from ncclsync.tools.factories import UsageError
from ncclsync.tools.processes import tell_of

DONE, WRONG, NOT_RUN = 0, 1, 2  # exit codes; argparse ends with 2 as well

_MIRRORED = "mirrored: tf.distribute.MirroredStrategy"
_LIBRARIES = (
    f"{_MIRRORED}; single: plain Keras on one device; shard: the same on one tower's part of the batch (1 is ideal "
    "with a GPU for each tower; N towers that share cores have N times its work); sharded: ncclsync with "
    "shard_optimizer; processes: ncclsync as 2 processes, by mpirun, which share the towers"
)
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def add_bench(commands: Any) -> None:
    """Add `bench` and its benchmarks to a parser's subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure all-reduce, step, start, feeding and memory, beside other libraries",
        description="Measure ncclsync beside other libraries, on this machine. The sides run in "
        "processes that take turns, so that other load meets all of them alike; medians are shown with "
        "quartiles (in parentheses), and ratios (÷) are taken within a round. Exit code 0: measured; 1: a "
        "result was wrong; 2: nothing was measured.",
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, home, rounds, about, *options in _BENCHMARKS:
        one = benchmarks.add_parser(name, help=about.partition(". ")[0], description=about)
        one.set_defaults(run=functools.partial(_run, home=home))
        json = file("--json", "write all figures there as well")
        add_options(one, *options, number("--rounds", 1, rounds, "turns of each side"), json)


def _list(name: str, parse: Callable[[str], Any], default: str, metavar: str, meaning: str = "") -> Option:
    # Sides beyond ncclsync's usual one may be left out.
    several = listed(parse, or_none=name in ("--against", "--shards"))
    return option(name, meaning, type=several, default=default, metavar=metavar)


def _models(default: str) -> Option:
    names = training.MODEL_NAMES
    return _list("--model", _one_of(names), default, "NAME,NAME", f"of {', '.join(names)}")


def _against(choices: tuple[str, ...], default: str, meaning: str) -> Option:
    return _list("--against", _one_of(choices), default, "NAME,NAME", f"{meaning}; 'none' for none")


def _shards(what: str) -> Option:
    """Return the option whose 1x,2x means [1, 2]."""
    meaning, times = f"{what} with so many shards for each tower, of the same batch", at_least(1)
    return _list("--shards", lambda text: times(text.removesuffix("x")), "none", "1x,2x", meaning)


def _run(given: argparse.Namespace, home: str) -> int:
    """Run a benchmark of the module `home`; process 0 alone shows its result or error."""
    process = None
    try:
        process = find_process()
        if process is not None and home == "training":
            raise BenchError(
                f"Expected one process: it starts others by itself. Received: {process.size}, by {process.launcher} "
                f"({process.reason})"
            )
        if process is None or process.rank == 0:
            check_json(given.json)
        if home == "on_gpus":
            progress("importing TensorFlow")
        module = importlib.import_module(f"ncclsync.tools.bench.{home}")
        result = getattr(module, f"bench_{given.benchmark.replace('-', '_')}")(given)
    except (BenchError, NcclSyncError) as error:
        progress("")
        if process is None:
            raise UsageError(str(error)) from error
        tell_of(error, process, f"python -m ncclsync bench {given.benchmark}")
        return NOT_RUN if process.rank == 0 else DONE  # otherwise mpirun might end process 0 before it has printed
    progress("")
    if process is not None and process.rank:
        return DONE
    show(result, given.json)
    return WRONG if any(row.more.get("wrong") for row in result.rows) else DONE


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def chosen(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(choices)}, received {text!r}")
        return text

    return chosen


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9.]+) ?([a-z]*)", text.lower())
    if not found or found[2] not in _UNITS or found[1].count(".") > 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 4KiB or 25MiB, received {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


_XLA = switch("--xla", "on CPUs, too, let XLA compile what Keras has it compile on GPUs")
_TOWERS, _NUMBERS = number("--towers", 1, 4), _list("--towers", at_least(1), "1,2,4,8", "N,N")
_AGAINST_MIRRORED = _against(("mirrored",), "mirrored", _MIRRORED)
_GPUS = "Needs as many GPUs as towers. A launcher's processes share the towers."
# Each with the module of `bench` that has it, how many turns its sides take by default, what it is about, and options.
_BENCHMARKS: tuple[tuple[Any, ...], ...] = (
    (
        "all-reduce",
        "all_reduce",
        11,
        "Time the all-reduce alone, as nccl-tests does. It is of float32, with checked results: by NCCL if there is a "
        "GPU and CUDA_VISIBLE_DEVICES is not empty, otherwise in host memory. The columns are those of nccl-tests: "
        "size of one tower's buffer, algbw = size / time, busbw = algbw * 2(n-1)/n. memcpy is a copy of all "
        "towers' buffers on all cores: it reads and writes the same bytes. Under mpirun: between its processes, one "
        "tower of each, beside MPI_Allreduce.",
        option("--towers", "default 2,4,8; not under mpirun", type=listed(at_least(2)), metavar="N,N"),
        _list("--sizes", _size, "4KiB,1MiB,25MiB,100MiB", "SIZE,SIZE", "of each tower's buffer"),
        _against(("mpi",), "mpi", "mpi: MPI_Allreduce, by mpi4py and mpirun, left out with a note if not installed"),
    ),
    (
        "exchange",
        "on_gpus",
        11,
        "Time how long the host needs to enqueue an all-reduce between GPUs. One graph has many of one small bucket in "
        f"a row; beside it the call of an empty graph is timed. {_GPUS}",
        _list("--towers", at_least(2), "2,4,8", "N,N"),
    ),
    (
        "overlap",
        "on_gpus",
        5,
        "Measure the share of the exchange that back-propagation hides. A step of dense layers, whose gradients fill "
        "five buckets, is timed as it is and without its exchanges, and the same exchanges alone. hidden: (without + "
        "exchange - step) / exchange. And the host's lead: when the call of a step returns, and when the GPUs are "
        f"through. {_GPUS}",
        number("--towers", 2, 4),
        switch("--xla", "let XLA compile the step, in a program for each bucket"),
        option("--link", "show too what `plan` predicts for it, such as run.py's --link", type=link, metavar="GB/s,µs"),
    ),
    (
        "step",
        "training",
        15,
        "Time a step inside fit, and where its time goes. Beside it the same model is timed under MirroredStrategy and "
        "on one device by plain Keras. The parts add up to the step. compute: forward and backward of all towers; "
        "communicate: what the exchanges between towers add; apply: the optimizer and all else after the last "
        "exchange; feed: what fit adds to a step on a batch in memory (making batches, callbacks, logs). They are "
        "differences of timings of the same step with parts left out, so that a small part may be negative by noise.",
        _models(",".join(training.MODEL_NAMES)),
        _TOWERS,
        _against(training.PEERS, "mirrored,single", _LIBRARIES),
        ("--no-split", {"dest": "split", "action": "store_false", "help": "only whole steps"}),
        switch(
            "--cpu",
            "only the seconds of cores that a step takes, beside plain Keras on one device: on the same batch in "
            "memory, an op on one thread on both sides. Batches are larger, so that the arithmetic on rows outweighs "
            "the update of the weights, which each tower does for itself",
        ),
        switch("--watched", "also time steps that Timeline and Throughput watch"),
        _shards("also time steps"),
        _XLA,
    ),
    (
        "start",
        "training",
        3,
        "Time from the call of the decorated factory to the end of the first step. It is timed in fresh processes, "
        "without imports. build: the factory's part of that time.",
        _models("resnet50"),
        _NUMBERS,
        _AGAINST_MIRRORED,
        _XLA,
    ),
    (
        "feed",
        "training",
        15,
        "Time a step inside fit on NumPy arrays, a tf.data.Dataset and a generator. A constant batch in memory is the "
        "ceiling: 1 means that feeding costs nothing.",
        _models("mlp"),
        _TOWERS,
        _list("--data", _one_of(training.FEEDS), ",".join(training.FEEDS), "KIND,KIND"),
        _against(
            ("mirrored", "single"), "none", "what feeding costs mirrored (MirroredStrategy), single (plain Keras)"
        ),
    ),
    (
        "memory",
        "training",
        3,
        "Measure the peak resident memory of a fresh process that trains for a few steps. imported: the memory before "
        "the model is built. state: the bytes of weights and optimizer. of needed: the peak, over the peak with one "
        "tower and the state of each further tower. of rows: the memory of the rows with shards, over that without. "
        "beyond: the peak less what is needed, over one tower's activations. The memory of rows, and of activations, "
        "is the peak less the peak with one row for each tower.",
        _models("resnet50"),
        _NUMBERS,
        _AGAINST_MIRRORED,
        _shards("also measure"),
        switch("--activations", "also tell how much more than needed is taken, over one tower's activations"),
        number("--batch-size", 1, None, "default: each model's own, as of `step`, and with --shards 64 times that"),
    ),
)

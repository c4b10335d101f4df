"""Parse the arguments of `python -m ncclsync bench`, run a benchmark, and print its result.

The benchmarks stand in `bench.all_reduce`, `.copies`, `.exchange`, `.overlap` and `.training`; nothing here imports
TensorFlow.
"""

import argparse
import importlib.util
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from ncclsync.communicator.processes import Process, find_process
from ncclsync.errors import NcclSyncError
from ncclsync.tools.arguments import at_least, link, listed
from ncclsync.tools.bench import all_reduce, copies, exchange, overlap, training
from ncclsync.tools.bench.plot import plot
from ncclsync.tools.bench.progress import Progress
from ncclsync.tools.bench.results import Listing, Result, show, write_json
from ncclsync.tools.bench.turns import BenchError
from ncclsync.tools.processes import tell_of

DONE, WRONG, NOT_RUN = 0, 1, 2  # exit codes; argparse ends with 2 as well

_DTYPES = ("float32", "float64", "float16", "int32", "int64")
_LIBRARIES = (
    "mirrored: tf.distribute.MirroredStrategy; single: plain Keras on one device; shard: the same on one "
    "tower's part of the batch (1 is ideal with a GPU for each tower; N towers that share cores have N times "
    "its work); sharded: ncclsync with shard_optimizer; processes: ncclsync as 2 processes, by mpirun, which share the "
    "towers"
)
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}

# None: another process has the result.
Benchmark = Callable[[argparse.Namespace, Callable[[str], None]], Result | None]


def add_bench(commands: Any) -> None:
    """Add `bench` and its benchmarks to a parser's subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure all-reduce, step, start, feeding and memory, beside other libraries",
        description="Measure ncclsync beside other libraries, on this machine. The sides run in "
        "processes that take turns, so that other load meets all of them alike; medians are shown with "
        "quartiles (in parentheses), and ratios are taken within a round. Exit code 0: measured; 1: a "
        "result was wrong; 2: nothing was measured.",
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    _add_all_reduce(benchmarks)
    _add_exchange(benchmarks)
    _add_overlap(benchmarks)
    _add_copies(benchmarks)
    _add_step(benchmarks)
    _add_start(benchmarks)
    _add_feed(benchmarks)
    _add_memory(benchmarks)


def _add_all_reduce(benchmarks: Any) -> None:
    parser = _add(
        benchmarks,
        "all-reduce",
        all_reduce.bench_all_reduce,
        all_reduce.listings,
        help="the collective alone, as nccl-tests does",
        description="Time the all-reduce alone and check its results. The columns are those of nccl-tests: "
        "size of one tower's buffer, algbw = size / time, busbw = algbw * 2(n-1)/n. memcpy is a copy of all "
        "towers' buffers on all cores: it reads and writes the same bytes. Under mpirun: between its processes, one "
        "tower of each, beside MPI_Allreduce and TensorFlow's collectives over gRPC.",
    )
    parser.add_argument("--towers", type=listed(at_least(2)), metavar="N,N", help="default 2,4,8; not under mpirun")
    parser.add_argument(
        "--sizes",
        type=listed(_size),
        default=[4 << 10, 1 << 20, 25 << 20, 100 << 20],
        metavar="SIZE,SIZE",
        help="of each tower's buffer; default 4KiB,1MiB,25MiB,100MiB",
    )
    _add_against(
        parser,
        all_reduce.PEERS,
        list(all_reduce.PEERS),
        "mpi: MPI_Allreduce, by mpi4py and mpirun, left out with a note if not installed; tensorflow: its "
        "CollectiveReduceV2, beside ncclsync's op in a graph",
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="default %(default)s")
    parser.add_argument(
        "--backend",
        choices=("nccl", "cpu"),
        help="nccl: between GPUs; cpu: in host memory; default: nccl where there is a GPU",
    )
    _add_rounds(parser, 11, "turns of each library for each size")


def _add_exchange(benchmarks: Any) -> None:
    parser = _add(
        benchmarks,
        "exchange",
        exchange.bench_exchange,
        exchange.listings,
        help="the host time of an all-reduce between towers on GPUs",
        description="Time how long the host needs to enqueue an all-reduce of one small bucket, many in a row in one "
        "graph, and, for comparison, the call of a graph without any. Needs as many GPUs as towers.",
    )
    parser.add_argument("--towers", type=listed(at_least(2)), default=[2, 4, 8], metavar="N,N", help="default 2,4,8")
    _add_rounds(parser, 11, "turns of each graph")


def _add_overlap(benchmarks: Any) -> None:
    parser = _add(
        benchmarks,
        "overlap",
        overlap.bench_overlap,
        overlap.listings,
        help="the share of the exchange that back-propagation hides",
        description="Time a step of dense layers, whose gradients fill five buckets, as it is and without its "
        "exchanges, and the same exchanges alone. hidden: (without exchanges + exchanges alone - step) / exchanges "
        "alone. And the host's lead: when the call of a step returns, and when the GPUs are through. Needs as many "
        "GPUs as towers.",
    )
    _add_towers(parser, 2)
    parser.add_argument("--xla", action="store_true", help="let XLA compile the step, in a program for each bucket")
    parser.add_argument(
        "--link", type=link, metavar="GB/s,µs", help="show too what `plan` predicts for it, such as run.py's --link"
    )
    _add_rounds(parser, 5, "turns of each side")


def _add_copies(benchmarks: Any) -> None:
    parser = _add(
        benchmarks,
        "copies",
        copies.bench_copies,
        copies.listings,
        help="whether batches are copied to GPUs beside the computation",
        description="Time a step in fit, the same step on a batch that stays on the GPUs, and the copies of a batch "
        "alone, over 100 steps each: at best a step takes as long as the longer of the two. Needs as many GPUs as "
        "towers.",
    )
    _add_towers(parser, 2)
    _add_rounds(parser, 3, "turns of each side")


def _add_step(benchmarks: Any) -> None:
    parser = _add(
        benchmarks,
        "step",
        training.bench_step,
        training.step_listings,
        help="one step of training inside fit, and where its time goes",
        description="Time a step inside fit, beside the same model under MirroredStrategy and on one "
        "device by plain Keras. The parts add up to the step. compute: forward and backward of all towers; "
        "communicate: what the exchanges between towers add; apply: the optimizer and what else follows the "
        "last exchange; feed: what fit adds to a step on a batch that is in memory already (making batches, "
        "callbacks, logs). They are differences of timings of the same step with parts left out, so that a "
        "small one may be negative by noise.",
    )
    _add_model(parser, list(training.MODEL_NAMES))
    _add_towers(parser)
    _add_against(parser, training.PEERS, ["mirrored", "single"], _LIBRARIES)
    parser.add_argument("--no-split", dest="split", action="store_false", help="only whole steps")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="only the seconds of cores that a step takes, beside plain Keras on one device: on the same batch in "
        "memory, an op on one thread on both sides",
    )
    parser.add_argument("--watched", action="store_true", help="also time steps that Timeline and Throughput watch")
    _add_shards(parser, "also time steps with so many shards for each tower, of the same batch; default none")
    _add_rounds(parser, 15, "turns of each side")


def _add_shards(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--shards", type=listed(_times), default=[], metavar="1x,2x", help=text)


def _times(text: str) -> int:
    """Return 2 for "2x"."""
    return at_least(1)(text.removesuffix("x"))


def _add_start(benchmarks: Any) -> None:
    parser = _add(
        benchmarks,
        "start",
        training.bench_start,
        training.start_listings,
        help="from the call of the decorated factory to the end of the first step",
        description="Time from the call of the decorated factory to the end of the first step, without "
        "imports, each time in a fresh process.",
    )
    _add_model(parser, ["resnet50"])
    _add_numbers_of_towers(parser)
    _add_against(parser, ("mirrored",), ["mirrored"], "mirrored: tf.distribute.MirroredStrategy")
    _add_rounds(parser, 3, "fresh processes of each side")


def _add_feed(benchmarks: Any) -> None:
    parser = _add(
        benchmarks,
        "feed",
        training.bench_feed,
        training.feed_listings,
        help="fit on NumPy, tf.data and a generator",
        description="Time a step inside fit on NumPy arrays, a tf.data.Dataset and a generator, and on a "
        "constant batch that is in memory already, which is the ceiling: 1 means that feeding costs nothing.",
    )
    _add_model(parser, ["mlp"])
    _add_towers(parser)
    feeds = training.FEEDS
    parser.add_argument(
        "--data",
        type=listed(_one_of(feeds)),
        default=list(feeds),
        metavar="KIND,KIND",
        help=f"of {', '.join(feeds)}; default: all",
    )
    peers = ("mirrored", "single")
    _add_against(parser, peers, [], "what feeding costs mirrored (MirroredStrategy), single (plain Keras)")
    _add_rounds(parser, 15, "turns of each side")


def _add_memory(benchmarks: Any) -> None:
    parser = _add(
        benchmarks,
        "memory",
        training.bench_memory,
        training.memory_listings,
        help="peak resident memory of the host by number of towers",
        description="Measure the peak resident memory of a process that trains for a few steps, each time a "
        "fresh one. needed: the peak with one tower, and for each more tower weights and optimizer state. The "
        "share of the rows, and the activations, are the peak less that of one row for each tower.",
    )
    _add_model(parser, ["resnet50"])
    _add_numbers_of_towers(parser)
    _add_against(parser, ("mirrored",), ["mirrored"], "mirrored: tf.distribute.MirroredStrategy")
    _add_shards(parser, "also measure so many shards for each tower, of the same batch; default none")
    parser.add_argument(
        "--activations",
        action="store_true",
        help="also tell how much more than needed is taken, beside one tower's activations",
    )
    parser.add_argument(
        "--batch-size",
        type=at_least(1),
        metavar="ROWS",
        help="of the batch; default: each model's own, as of `step`, and with --shards 64 times that",
    )
    _add_rounds(parser, 3, "fresh processes of each side")


def _add_model(parser: argparse.ArgumentParser, default: list[str]) -> None:
    names = training.MODEL_NAMES
    parser.add_argument(
        "--model",
        type=listed(_one_of(names)),
        default=default,
        metavar="NAME,NAME",
        help=f"of {', '.join(names)}; default {','.join(default)}",
    )


def _add_towers(parser: argparse.ArgumentParser, least: int = 1) -> None:
    parser.add_argument("--towers", type=at_least(least), default=4, metavar="N", help="default %(default)s")


def _add_numbers_of_towers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--towers", type=listed(at_least(1)), default=[1, 2, 4, 8], metavar="N,N", help="default 1,2,4,8"
    )


def _add(
    benchmarks: Any, name: str, benchmark: Benchmark, listings: Callable[[], list[Listing]], **texts: str
) -> argparse.ArgumentParser:
    """Add a benchmark, with the arguments of all benchmarks."""
    parser = benchmarks.add_parser(name, **texts)
    parser.set_defaults(run=lambda given: _run(given, benchmark, listings))
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures there as well")
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE.png", help="draw them, to .png, .svg or .pdf; needs matplotlib"
    )
    return parser


def _add_against(parser: argparse.ArgumentParser, choices: tuple[str, ...], default: list[str], meaning: str) -> None:
    parser.add_argument(
        "--against",
        type=listed(_one_of(choices)),
        default=default,
        metavar="NAME,NAME",
        help=f"{meaning}; 'none' for none; default {','.join(default) or 'none'}",
    )


def _add_rounds(parser: argparse.ArgumentParser, default: int, meaning: str) -> None:
    parser.add_argument(
        "--rounds", type=at_least(1), default=default, metavar="N", help=f"{meaning}; default %(default)s"
    )


def _run(given: argparse.Namespace, benchmark: Benchmark, listings: Callable[[], list[Listing]]) -> int:
    """Run a benchmark; of several processes only the first shows the result, or the error."""
    if given.plot and importlib.util.find_spec("matplotlib") is None:
        print(f"{_name(given)}: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return NOT_RUN
    progress = Progress()
    process = None
    try:
        process = _process(given)
        result = benchmark(given, progress.show)
    except BenchError as error:
        progress.clear()
        if process is None:
            print(f"{_name(given)}: {error}", file=sys.stderr)
            return NOT_RUN
        tell_of(error, process, _name(given))
        return NOT_RUN if process.rank == 0 else DONE  # otherwise mpirun might end the first before it has printed
    if result is None:
        return DONE
    progress.clear()
    show(result, listings())
    if given.json:
        write_json(result, sys.argv[1:], given.json)
    if given.plot:
        plot(result, given.plot)
    return WRONG if any(row.more.get("wrong") for row in result.rows) else DONE


def _process(given: argparse.Namespace) -> Process | None:
    try:
        process = find_process()
    except NcclSyncError as error:
        raise BenchError(str(error)) from error
    if process is not None and given.benchmark != "all-reduce":
        if process.rank > 0:
            raise SystemExit(DONE)
        raise BenchError(
            f"Expected one process: it starts others by itself. Received: {process.size}, by {process.launcher} "
            f"({process.reason})"
        )
    return process


def _name(given: argparse.Namespace) -> str:
    return f"python -m ncclsync bench {given.benchmark}"


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

"""Parse the arguments of `python -m ncclsync plan` and run it. TensorFlow is imported to measure."""

import argparse
import dataclasses
import logging
import math
from typing import Any

from ncclsync.costs.links import CLUSTERS, cluster_of
from ncclsync.tools.arguments import add_options, at_least, file, link, listed, number, option
from ncclsync.tools.bench.results import check_json, show, significant
from ncclsync.tools.bench.turns import Spread, progress
from ncclsync.tools.factories import UsageError, add_model_arguments, load, model_and_data
from ncclsync.tools.plan.results import Found, cluster_text, result_of

PREDICTED = 0  # exit code; `cli` shows errors, with 2

_BATCH_SIZE = 32  # Keras' own
LAUNCH_US = 30.0  # the most that `bench exchange` found on two cores with other load
_SIZES = (1, 2, 4)  # the batch is measured whole, halved, and in quarters


def add_plan(commands: Any) -> None:
    """Add `plan` to a parser's subcommands."""
    parser = commands.add_parser(
        "plan",
        help="predict step time and efficiency on N GPUs, before they are bought or rented",
        description="Time a model's step on one device here, take from its traced program what it would "
        "exchange, and predict steps on N GPUs by latency and bandwidth of their links. Says when one GPU is "
        "the better choice. Exit code 0: predicted; 2: not.",
    )
    parser.set_defaults(run=_plan)
    add_model_arguments(parser, f"of each GPU; default {_BATCH_SIZE}, or the model's own")
    clusters = "; ".join(f"{name}: {cluster_text(one)}" for name, one in CLUSTERS.items())
    cluster = f"{clusters}; or bandwidth of each GPU and direction, and latency, such as 370,1.9"
    launch = "of the host to launch an exchange, for each of its GPUs (`bench exchange`)"
    add_options(
        parser,
        option("--gpus", type=listed(at_least(2)), default="8,64,1024", metavar="N,N"),
        option("--link", cluster, default="nvlink", metavar="NAME|GB/s,µs"),
        option("--between", "of each host to the others, all its cards together", type=link, metavar="GB/s,µs"),
        number("--gpus-per-host", 1, None, "default 8; ib: 1"),
        option("--launch-us", launch, type=_positive, default=LAUNCH_US, metavar="µs"),
        number("--rounds", 1, 7, "turns of each batch size"),
        file("--json", "write all figures there as well"),
    )
    speedup = "how many times as fast the GPUs compute as the device here"
    step = "a step's time on one of the GPUs, instead of measuring here; with several batch sizes what does not depend "
    step += "on the batch can be distinguished"
    add_options(
        parser.add_mutually_exclusive_group(),
        option("--compute-speedup", speedup, type=_positive, default=1.0, metavar="X"),
        option("--step-ms", step, type=_step_ms, metavar="MS|BATCH:MS,BATCH:MS"),
    )


def _plan(given: argparse.Namespace) -> int:
    check_json(given.json)
    try:
        cluster = cluster_of(given.link, given.between, given.gpus_per_host, max(given.gpus))
    except ValueError as error:
        raise UsageError(str(error)) from error
    cluster = dataclasses.replace(cluster, launch_s=given.launch_us / 1e6)
    try:
        found = _measure(given)
    finally:
        progress("")
    show(result_of(given.factory, given.link, given.gpus, cluster, found), given.json)
    return PREDICTED


def _measure(given: argparse.Namespace) -> Found:
    named = load(given.factory)
    progress("importing TensorFlow, building the model")
    from ncclsync.parallel import Undecorated

    factory = Undecorated(named)
    model, data, batch_size = model_and_data(given, factory, _BATCH_SIZE, batches=1)
    if model.run_eagerly:
        raise UsageError("Expected a model whose step can be traced. Received: one with run_eagerly=True")
    from ncclsync.ops.device_ops import default_device
    from ncclsync.tools.plan.measurement import step_seconds, traced_traffic
    from ncclsync.training.random_data import fixed_batch_size

    if given.step_ms is not None:
        seconds = {batch or batch_size: [ms / 1e3] for batch, ms in given.step_ms.items()}
        origin = "as said by --step-ms"
    else:
        sizes = {batch_size} if fixed_batch_size(model) else {-(-batch_size // part) for part in _SIZES}
        measured = step_seconds(model, data, sorted(sizes), given.rounds)
        seconds = {batch: samples / given.compute_speedup for batch, samples in measured.items()}
        taken = f"taken as {significant(given.compute_speedup)} times as fast"
        if given.compute_speedup == 1:
            taken = "taken as it is (--compute-speedup 1): say how much faster the GPUs are, or --step-ms"
        origin = f"measured here on {default_device()}, {taken}"
    del model  # free its memory for the model on a tower
    progress("tracing the step on towers")
    logger = logging.getLogger("ncclsync")
    level = logger.level
    logger.setLevel(logging.ERROR)  # `verify` reports inexact parts
    try:
        stages, conditional = traced_traffic(factory, factory.options, data, batch_size)
    finally:
        logger.setLevel(level)
    spreads = {batch: Spread.of(samples) for batch, samples in seconds.items()}
    return Found(batch_size, spreads, origin, stages, conditional)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, received {text!r}")
    return number


def _step_ms(text: str) -> dict[int, float]:
    """Return milliseconds by batch size; 0 stands for that of --batch-size."""
    if ":" not in text:
        return {0: _positive(text)}
    pairs = [part.partition(":") for part in text.split(",")]
    found = {at_least(1)(batch): _positive(ms) for batch, _, ms in pairs}
    if len(found) < len(pairs):
        raise argparse.ArgumentTypeError(f"expected each batch size once, received {text!r}")
    return found

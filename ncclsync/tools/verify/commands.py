"""Parse the arguments of `python -m ncclsync verify` and run it. TensorFlow is imported to compare."""

import argparse
from typing import Any

from ncclsync.tools.arguments import add_options, number, option, switch
from ncclsync.tools.bench.turns import progress
from ncclsync.tools.factories import add_model_arguments, load, model_and_data

SAME, DIFFERENT = 0, 1  # exit codes; `cli` ends with 2 where nothing was compared

_BATCH_SIZE = 33


def add_verify(commands: Any) -> None:
    """Add `verify` to a parser's subcommands."""
    parser = commands.add_parser(
        "verify",
        help="train a model on one device and on N towers, with random data or yours, and compare",
        description="Train a model on one device and on N towers, with random data or yours, and compare after "
        "every step. Exit code 0: equal; 1: different; 2: nothing was compared.",
    )
    parser.set_defaults(run=_verify)
    add_model_arguments(parser, f"default {_BATCH_SIZE}, or the model's own")
    add_options(
        parser,
        number("--towers", 2, 4),
        option("--devices", "just these instead", metavar="GPU:0,GPU:1"),
        option("--backend", "default: follows the devices", choices=("nccl", "cpu")),
        number("--steps", 1, 5),
        option("--tolerance", "relative; default: by dtype", type=float, metavar="X"),
        switch("--exact", "exact=True, as in nccl_parallel"),
    )


def _verify(given: argparse.Namespace) -> int:
    progress("importing TensorFlow, building the model")
    try:
        report = _compare(given)
    finally:
        progress("")
    from ncclsync.towers.printed import show

    show(report)
    return SAME if report.ok else DIFFERENT


def _compare(given: argparse.Namespace) -> Any:
    named = load(given.factory)
    from ncclsync.parallel import Undecorated
    from ncclsync.tools.verify.verification import verify
    from ncclsync.towers.placement import share_cores

    devices = given.devices.split(",") if given.devices else None
    share_cores(given.towers, devices)  # before a model, which tells what random batches have, starts TensorFlow
    options = {"devices": devices, "backend": given.backend, "exact": given.exact}
    factory = Undecorated(named)
    _, data, batch_size = model_and_data(given, factory, _BATCH_SIZE, batches=given.steps)
    return verify(
        factory,
        data,
        given.towers,
        given.steps,
        batch_size=batch_size,
        tolerance=given.tolerance,
        seed=given.seed,
        **{name: value for name, value in options.items() if value},
    )

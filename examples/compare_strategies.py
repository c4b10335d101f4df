"""Train one model in ten ways on several devices; tell how each differs from one device.

The ways are the files of strategies/: shared layers, parameter servers, replicated towers, a ring of
processes, tf.distribute, and so on, written afresh on Keras 3 and TensorFlow 2. All train the same small CNN
with the same SGD, from the same start, on the same batches in the same order, each in a process of its own;
steps are timed in turns. Towers are on the CPU. The columns:

    accuracy            on the test data, after all rounds
    distance            ‖w − w₁‖ / ‖w₁ − w₀‖ after the first round: w₁ one device's weights then, w₀ the
                        start's; of a plain model, one with BatchNormalization, and one with its
                        synchronized=True
    indivisible batch   what becomes of a round with a last batch of 5 rows
    step                median time of a step, in the rounds after the first
    first step          from building the model to the end of its first step, with the start of other
                        processes
    memory              peak resident memory of all its processes together, a TensorFlow in each
    moved               bytes that a step moves between towers, servers or processes, without the batch, by
                        the formula in the strategy's file; and on which way
    saves               whether `save` gives a plain Keras model

Below the table stand the causes of all distances above 0.0001; what is below is rounding.

    python examples/compare_strategies.py --plot examples/strategies.png
    python examples/compare_strategies.py --only mirrored,ncclsync_towers --data cifar10
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile

from strategies import NAMES
from strategies.conditions import CONDITIONS, LAST_ROWS

from ncclsync.tools.bench.turns import BenchError, Side, take_turns

EXAMPLES = pathlib.Path(__file__).resolve().parent


def open_side(name, options):
    """Start a process for a strategy."""
    paths = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(paths)}
    task = {"towers": options.towers, "data": options.data}
    task |= {"batch_size": options.batch_size, "steps": options.steps}
    return Side(name, name, task, environment=environment, module="strategies.worker")


def train_all(names, options, folders):
    """Train every strategy's model with `BatchNormalization`, in turns.

    Returns:
        By name, the figures of `comparison.Row` that do not depend on one device, and the files of weights.
    """
    figures, files = {}, {}
    with contextlib.ExitStack() as stack:
        sides = {}
        for name in names:
            tell(f"{name}: first step, then a round of {options.steps}")
            side = sides[name] = stack.enter_context(open_side(name, options))
            started = side.ask("start", folder=folders[name])
            files[name] = {"start": started.pop("start")} | side.ask("first_round", folder=folders[name])
            figures[name] = started
        timers = {name: lambda side=side: side.ask("round")["step_s"] for name, side in sides.items()}
        seconds = take_turns(timers, options.rounds - 1, tell)
        for name, side in sides.items():
            tell(f"{name}: accuracy, memory, file")
            figures[name] |= side.ask("finish", folder=folders[name])
            figures[name]["step_s"] = statistics.median(seconds[name])
    return figures, files


def train_under(name, options, folder, condition, last_rows=None):
    """Train a new model in a new process, under a condition; see `Session.condition`."""
    tell(f"{name}: {condition}")
    with open_side(name, options) as side:
        return side.ask("condition", name=condition, folder=folder, last_rows=last_rows)


def measure(names, options, folder):
    """Return the `Row` of every strategy."""
    from strategies.comparison import compare

    folders = {name: str(pathlib.Path(folder, name)) for name in names}
    for each in folders.values():
        pathlib.Path(each).mkdir()
    figures, files = train_all(names, options, folders)
    found = {}
    for name in names:
        others = [condition for condition in CONDITIONS if condition != "batch norm"]
        found[name] = {each: train_under(name, options, folders[name], each) for each in others}
        found[name]["batch norm"] = files[name]
    base = names[0]
    whole = LAST_ROWS // options.towers * options.towers
    dropped = train_under(base, options, folders[base], "last batch", whole)["weights"]
    return [compare(name, figures[name], found[name], found[base], dropped) for name in names]


def tell(text):
    """Tell the progress."""
    print(text, file=sys.stderr, flush=True)


def parse():
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=NAMES, help="files of strategies/")
    parser.add_argument("--data", choices=("digits", "cifar10"), default="digits", help="default: %(default)s")
    parser.add_argument("--towers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=22, help="of a round; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="at least 2; default: %(default)s")
    parser.add_argument("--json", type=pathlib.Path, help="where to write all rows")
    parser.add_argument("--plot", type=pathlib.Path, help="where to draw the table, such as strategies.png")
    options = parser.parse_args()
    if unknown := set(options.only) - set(NAMES):
        parser.error(f"Expected names of {', '.join(NAMES)}. Received: {', '.join(sorted(unknown))}")
    if options.towers < 2 or options.rounds < 2 or LAST_ROWS % options.towers == 0:
        parser.error(f"Expected 2 rounds, 2 towers, and towers that do not divide {LAST_ROWS}")
    return options


def main():
    """Measure, print, and write what is asked for."""
    options = parse()
    names = list(dict.fromkeys(["one_device", *options.only]))
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(names, options, folder)
    except BenchError as error:
        raise SystemExit(str(error)) from None
    from strategies import table

    table.show(rows, options.towers)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if options.plot:
        table.plot(rows, options.plot, options.towers)


if __name__ == "__main__":
    main()

"""Run `bench step`, `start`, `feed` and `memory`: drive processes that train, and read what they measured."""

import argparse
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ncclsync.tools.bench.results import Result, Row
from ncclsync.tools.bench.turns import BenchError, Side, Spread, about, by_key, fill_turns, launched, ratio, take_turns

# The rows of a global batch of each model in `bench.models`; not there, which imports TensorFlow.
BATCH_SIZES = {
    **{"mlp": 256, "cnn": 128, "resnet50": 32, "transformer": 64, "embedding": 256},
    **{"lstm": 128, "language": 64, "seq2seq": 64, "unet": 32, "sparse": 256},
}
# The same for `--cpu`: enough rows for their arithmetic to outweigh the update, which each tower makes.
_MANY_ROWS = BATCH_SIZES | {"mlp": 2048, "resnet50": 512, "lstm": 2048, "seq2seq": 512, "sparse": 65536}
MODEL_NAMES = tuple(BATCH_SIZES)
PEERS = ("mirrored", "single", "shard", "sharded", "processes")
FEEDS = ("numpy", "tf.data", "generator")

PROCESSES = 2  # of the side "processes", which share the towers

_TURN_S = 0.2  # of one side
_TO_DIVIDE = 64  # times a model's own batch: its memory then outweighs that of the weights, and shards can divide it
_ONE_ROW = "one row a tower"

Answers = dict[str, dict[str, np.ndarray]]  # of sides by name, by key: [rounds]


def bench_step(given: argparse.Namespace) -> Result:
    """Time a step inside `fit`, and the parts of ncclsync's."""
    libraries = ["ncclsync", *(["single"] if given.cpu else given.against)]
    if "processes" in libraries:  # before anything is started
        if given.towers % PROCESSES:
            raise BenchError(f"Expected towers that {PROCESSES} processes can share. Received: --towers {given.towers}")
        launched(PROCESSES)
    rows: list[Row] = []
    notes: list[str] = []
    # Further sides of ncclsync.
    others = {name: {"shards": each * given.towers} for name, each in _by_shards(given.shards).items()}
    others |= {"watched": {"watched": True}} if given.watched else {}
    variants = ["whole", "local", "compute"] if given.split and given.towers > 1 and not given.cpu else []
    for model in given.model:
        batch_size = (_MANY_ROWS if given.cpu else BATCH_SIZES)[model]
        how: dict[str, Any] = {"model": model, "feed": "constant" if given.cpu else "tf.data", "towers": given.towers}
        how |= {"batch_size": batch_size, "xla": given.xla, "one_thread": given.cpu}
        sides = {library: {"library": library, **how} for library in libraries}
        sides |= {name: {"library": "ncclsync", **how, **more} for name, more in others.items()}
        answers = _fit_in_turns(model, sides, variants, given.rounds)
        notes += _compiled(model, answers)
        case = {"model": model, "towers": given.towers, "batch_size": batch_size}
        for name in sides:
            found, bases = answers[name], ["ncclsync"] if name in others else libraries
            spread = Spread.of(found["seconds"])
            ratios = {base: ratio(found["seconds"], answers[base]["seconds"]) for base in bases if base != name}
            samples = batch_size // (given.towers if name == "shard" else 1)
            figures: dict[str, Any] = {"samples_per_s": samples / spread.median}
            figures["cpu_s"] = Spread.of(found["cpu_seconds"])
            if "single" in bases and name != "single":
                figures["cpu_of_single"] = ratio(found["cpu_seconds"], answers["single"]["cpu_seconds"])
            if name == "ncclsync" and variants:
                figures |= _split(answers)
            rows.append(Row(case, name, spread, ratios, figures))
    return Result("step", "s", tuple(rows), tuple(notes))


def _split(answers: Answers) -> dict[str, Spread]:
    """Return the time of each part of ncclsync's step: differences of the step's variants, round by round."""
    compute, local, whole, fit = (answers[name]["seconds"] for name in ("compute", "local", "whole", "ncclsync"))
    parts = {"compute": compute, "communicate": whole - local, "apply": local - compute, "feed": fit - whole}
    return {f"{name}_s": Spread.of(samples) for name, samples in parts.items()}


def bench_feed(given: argparse.Namespace) -> Result:
    """Time a step inside `fit` on data of several kinds, and on a constant batch."""
    rows: list[Row] = []
    notes: list[str] = []
    pairs = [(library, feed) for library in ("ncclsync", *given.against) for feed in ("constant", *given.data)]
    names = {pair: ", ".join(pair).removeprefix("ncclsync, ") for pair in pairs}
    for model in given.model:
        how = {"model": model, "towers": given.towers}
        sides = {name: {"library": library, "feed": feed, **how} for (library, feed), name in names.items()}
        answers = _fit_in_turns(model, sides, (), given.rounds)
        notes += _compiled(model, answers)
        case = {"model": model, "towers": given.towers, "batch_size": BATCH_SIZES[model]}
        for (library, _), name in names.items():
            spread = Spread.of(answers[name]["seconds"])
            of_ceiling = ratio(answers[names[library, "constant"]]["seconds"], answers[name]["seconds"])
            figures = {"samples_per_s": BATCH_SIZES[model] / spread.median, "of_ceiling": of_ceiling}
            rows.append(Row(case, name, spread, {}, figures))
    return Result("feed", "s", tuple(rows), tuple(notes))


def _fit_side(library: str, model: str, feed: str, *, one_thread: bool = False, **how: Any) -> Side:
    """Start a side; `how`: towers, shards, xla, watched, and the batch size unless it is the model's own."""
    arguments = {"library": library, "model": model, "feed": feed, "batch_size": BATCH_SIZES[model], **how}
    name = f"{library}, {model}, {feed}"
    if library == "processes":
        arguments["towers"] //= PROCESSES
        return Side(name, "fit.fit_in_turns", arguments, launched(PROCESSES))
    environment = {"TF_NUM_INTRAOP_THREADS": "1"} if one_thread else None
    return Side(name, "fit.fit_in_turns", arguments, environment=environment)


def _fit_in_turns(model: str, sides: Mapping[str, Mapping], variants: Sequence[str], rounds: int) -> Answers:
    """Have sides, by arguments of `_fit_side`, and variants of the first side's step take turns."""
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context(_fit_side(**how)) for name, how in sides.items()}
        first = next(iter(opened.values()))
        asks = {name: functools.partial(side.ask, "fit") for name, side in opened.items()}
        asks |= {variant: functools.partial(first.ask, variant) for variant in variants}
        return fill_turns(asks, _TURN_S, rounds, about(model))


def bench_start(given: argparse.Namespace) -> Result:
    """Time from the factory's call to the end of the first step, each in a fresh process."""
    libraries = ("ncclsync", *given.against)

    def sides_of(model: str, towers: int) -> dict[str, dict[str, Any]]:
        return {side: {"library": side, "rows": BATCH_SIZES[model], "xla": given.xla} for side in libraries}

    def figures_of(answers: Answers, side: str, towers: int) -> dict[str, Any]:
        return {key: Spread.of(answers[f"{side} × {towers}"][key]) for key in ("build_seconds", "cpu_seconds")}

    return _in_fresh_processes(given, "fit.first_step", "seconds", sides_of, figures_of)


def bench_memory(given: argparse.Namespace) -> Result:
    """Measure the peak resident memory, each time in a fresh process."""
    libraries, by_shards = ("ncclsync", *given.against), _by_shards(given.shards)

    def sides_of(model: str, towers: int) -> dict[str, dict[str, Any]]:
        rows = given.batch_size or BATCH_SIZES[model] * (_TO_DIVIDE if by_shards else 1)
        sides: dict[str, dict[str, Any]] = {side: {"library": side, "rows": rows} for side in libraries}
        sides |= {side: {**sides["ncclsync"], "shards": each * towers} for side, each in by_shards.items()}
        if by_shards or given.activations:
            sides[_ONE_ROW] = {"library": "ncclsync", "rows": towers}
        return sides

    def figures_of(answers: Answers, side: str, towers: int) -> dict[str, Any]:
        def values(side: str, towers: int = towers, key: str = "bytes") -> np.ndarray:
            return answers[f"{side} × {towers}"][key]

        figures = {key: Spread.of(values(side, key=key)) for key in ("imported_bytes", "state_bytes")}
        if 1 in given.towers:
            needed = values(side, 1) + (towers - 1) * values(side, key="state_bytes")
            figures["of_needed"] = ratio(values(side), needed)
            if given.activations and side == "ncclsync" and towers > 1:
                figures["beyond"] = ratio(values(side) - needed, values(side, 1) - values(_ONE_ROW, 1))
        if side in by_shards:
            one_row = values(_ONE_ROW)
            figures["of_rows"] = ratio(values(side) - one_row, values("ncclsync") - one_row)
        return figures

    return _in_fresh_processes(given, "fit.peak_memory", "bytes", sides_of, figures_of)


def _in_fresh_processes(
    given: argparse.Namespace,
    kind: str,
    key: str,
    sides_of: Callable[[str, int], dict[str, dict[str, Any]]],
    figures_of: Callable[[Answers, str, int], dict[str, Any]],
) -> Result:
    """Measure `key`, each time in a fresh process, for all models, numbers of towers, and sides by `sides_of`."""
    rows: list[Row] = []
    notes: list[str] = []
    libraries = ("ncclsync", *given.against)
    for model in given.model:
        names, turns = {}, {}
        for towers in given.towers:
            for side, how in sides_of(model, towers).items():
                names[name := f"{side} × {towers}"] = side, towers
                arguments = {"model": model, "towers": towers, **how}
                turns[name] = functools.partial(_answer, f"{name}, {model}", kind, arguments)
        answers = by_key(take_turns(turns, given.rounds, about(model)))
        for name, (side, towers) in names.items():
            bases = {other: f"{other} × {towers}" for other in libraries if side in libraries and other != side}
            if 1 in given.towers and towers > 1:
                bases["one tower"] = f"{side} × 1"
            ratios = {other: ratio(answers[name][key], answers[base][key]) for other, base in bases.items()}
            figures, case = figures_of(answers, side, towers), {"model": model, "towers": towers}
            rows.append(Row(case, side, Spread.of(answers[name][key]), ratios, figures))
        notes += _compiled(model, answers)
    return Result(given.benchmark, "B" if key == "bytes" else "s", tuple(rows), tuple(notes))


def _answer(name: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    with Side(name, kind, arguments) as side:
        return side.ask("go")


def _by_shards(counts: Sequence[int]) -> dict[str, int]:
    """Return the names of the sides that have so many shards for each tower."""
    return {f"{each} shard{'s' * (each > 1)} a tower": each for each in counts}


def _compiled(model: str, answers: Answers) -> list[str]:
    """Return a note of the sides whose steps XLA compiles: Keras chooses none on CPUs or under MirroredStrategy."""
    compiled = dict.fromkeys(name.partition(" × ")[0] for name, found in answers.items() if any(found.get("xla", ())))
    return [f"{model}: XLA compiles the steps of {', '.join(compiled)}."] if compiled else []

"""Run `bench step`, `start`, `feed` and `memory`: drive processes that train, and read what they measured."""

import argparse
import collections
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ncclsync.tools.bench.results import PARTS, Result, Row
from ncclsync.tools.bench.turns import BenchError, Side, Spread, about, filling, launched, ratio, take_turns

# The rows of a batch of each model in `bench.models`, which needs TensorFlow.
BATCH_SIZES = {
    **{"mlp": 256, "cnn": 128, "resnet50": 32, "transformer": 64, "embedding": 256},
    **{"lstm": 128, "language": 64, "seq2seq": 64, "unet": 32, "sparse": 256},
}
# Of `--cpu`: each tower updates all weights, whatever the batch. Here the arithmetic on rows outweighs that.
_MANY_ROWS = BATCH_SIZES | {"mlp": 2048, "resnet50": 512, "lstm": 2048, "seq2seq": 512, "sparse": 65536}
MODEL_NAMES = tuple(BATCH_SIZES)
PEERS = ("mirrored", "single", "shard", "sharded", "processes")
FEEDS = ("numpy", "tf.data", "generator")

PROCESSES = 2  # of the side "processes", which share the towers

_TURN_S = 0.2  # of one side
_MOST_STEPS = 100
_TO_DIVIDE = 64  # times a model's own batch, for shards that divide its memory
_MEMORY_STEPS = 5
_ONE_ROW = "one row a tower"

Show = Callable[[str], None]


def bench_step(given: argparse.Namespace, show: Show) -> Result:
    """Time a step inside `fit`, and the parts of ncclsync's."""
    if given.cpu:
        given = argparse.Namespace(**{**vars(given), "against": ["single"], "split": False})
    feed = "constant" if given.cpu else "tf.data"
    if "processes" in given.against:  # before anything is started
        if given.towers % PROCESSES:
            raise BenchError(f"Expected towers that {PROCESSES} processes can share. Received: --towers {given.towers}")
        launched(PROCESSES)
    rows: list[Row] = []
    notes: list[str] = []
    libraries, shards = ["ncclsync", *given.against], _by_shards(given.shards)
    variants = ("whole", "local", "compute") if given.split and given.towers > 1 else ()
    watched = ("watched",) if given.watched else ()
    for model in given.model:
        batch_size = (_MANY_ROWS if given.cpu else BATCH_SIZES)[model]
        side_of = functools.partial(
            _fit_side,
            model=model,
            towers=given.towers,
            feed=feed,
            batch_size=batch_size,
            xla=given.xla,
            one_thread=given.cpu,
        )
        started = {library: side_of(library) for library in libraries}
        started |= {name: side_of("ncclsync", shards=each * given.towers) for name, each in shards.items()}
        seconds, cpu_seconds, compiled = _fit_in_turns(started, (*variants, *watched), given.rounds, about(model, show))
        notes += _compiled(model, compiled)
        case = {"model": model, "towers": given.towers, "batch_size": batch_size}
        for name in started:
            spread = Spread.of(seconds[name])
            others = ["ncclsync"] if name in shards else libraries
            ratios = {other: ratio(seconds[name], seconds[other]) for other in others if other != name}
            samples = batch_size // (given.towers if name == "shard" else 1)
            figures: dict[str, Any] = {"samples_per_s": samples / spread.median, "cpu_s": Spread.of(cpu_seconds[name])}
            if "single" in others and name != "single":
                figures["cpu_of_single"] = ratio(cpu_seconds[name], cpu_seconds["single"])
            if name == "ncclsync" and variants:
                figures |= {f"{part}_s": Spread.of(samples) for part, samples in _split(seconds).items()}
            if name == "ncclsync" and watched:
                figures["watched"] = ratio(seconds["watched"], seconds[name])
            rows.append(Row(case, name, spread, ratios, figures))
    return Result("step", "s", tuple(rows), tuple(notes))


def _split(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return what each part of ncclsync's step takes, round by round: differences of variants of the step."""
    rounds = zip(*(seconds[name] for name in ("compute", "local", "whole", "ncclsync")), strict=True)
    parts: list[tuple[float, ...]] = [
        (compute, whole - local, local - compute, fit - whole) for compute, local, whole, fit in rounds
    ]
    return {name: list(samples) for name, samples in zip(PARTS, zip(*parts, strict=True), strict=True)}


def bench_feed(given: argparse.Namespace, show: Show) -> Result:
    """Time a step inside `fit` on data of several kinds, and on a constant batch."""
    rows: list[Row] = []
    notes: list[str] = []
    for model in given.model:
        sides = {
            _feed_name(library, feed): (library, feed)
            for library in ("ncclsync", *given.against)
            for feed in ("constant", *given.data)
        }
        started = {
            name: _fit_side(library, model, feed, towers=given.towers) for name, (library, feed) in sides.items()
        }
        seconds, _, compiled = _fit_in_turns(started, (), given.rounds, about(model, show))
        notes += _compiled(model, compiled)
        case = {"model": model, "towers": given.towers, "batch_size": BATCH_SIZES[model]}
        for name, (library, _) in sides.items():
            spread = Spread.of(seconds[name])
            ceiling = ratio(seconds[_feed_name(library, "constant")], seconds[name])
            figures = {"samples_per_s": BATCH_SIZES[model] / spread.median, "of_ceiling": ceiling}
            rows.append(Row(case, name, spread, {}, figures))
    return Result("feed", "s", tuple(rows), tuple(notes))


def _feed_name(library: str, feed: str) -> str:
    return feed if library == "ncclsync" else f"{library}, {feed}"


def _fit_side(library: str, model: str, feed: str, *, one_thread: bool = False, **how: Any) -> Side:
    """Start a side; `how`: towers, shards, xla, and the batch size, if it is not the model's own."""
    arguments = {"library": library, "model": model, "feed": feed, "batch_size": BATCH_SIZES[model], **how}
    name = f"{library}, {model}, {feed}"
    if library != "processes":
        return Side(
            name, "fit.fit_in_turns", arguments, environment={"TF_NUM_INTRAOP_THREADS": "1"} if one_thread else None
        )
    launcher, environment = launched(PROCESSES)
    return Side(name, "fit.fit_in_turns", {**arguments, "towers": how["towers"] // PROCESSES}, launcher, environment)


def _fit_in_turns(
    sides: dict[str, Side], variants: Sequence[str], rounds: int, show: Show
) -> tuple[dict[str, list[float]], dict[str, list[float]], list[str]]:
    """Return seconds per step, [rounds], of each side by name, and of variants of the first side's step.

    And the seconds that the host's cores worked for it, where a side reports them; and the names of the sides whose
    steps XLA compiles.
    """
    compiled: list[str] = []
    cpu_seconds: dict[str, list[float]] = collections.defaultdict(list)

    def turn(name: str, side: Side, do: str, steps: int) -> float:
        answer = side.ask(do, steps=steps)
        if "cpu_seconds" in answer:
            cpu_seconds[name].append(answer["cpu_seconds"])
        return answer["seconds"]

    with contextlib.ExitStack() as stack:
        for side in sides.values():
            stack.enter_context(side)
        first = next(iter(sides.values()))
        timed = {name: (side, "fit") for name, side in sides.items()}
        timed |= {variant: (first, variant) for variant in variants}
        timers = {}
        for name, (side, do) in timed.items():
            show(f"first steps of {name}")
            for _ in range(3):
                side.ask(do, steps=1)
            once = side.ask(do, steps=2)
            compiled += [name] * once.get("xla", False)
            steps = filling(_TURN_S, once["seconds"], _MOST_STEPS)
            timers[name] = functools.partial(turn, name, side, do, steps)
        return take_turns(timers, rounds, show), cpu_seconds, compiled


def _compiled(model: str, sides: Sequence[str]) -> list[str]:
    """Return a note of whose steps XLA compiles: Keras chooses, and does not under MirroredStrategy, nor on the CPU."""
    return [f"{model}: XLA compiles the steps of {', '.join(dict.fromkeys(sides))}."] if sides else []


def bench_start(given: argparse.Namespace, show: Show) -> Result:
    """Time from the factory's call to the end of the first step, each in a fresh process."""
    told = ("build_seconds", "cpu_seconds")
    return _fresh_processes(given, show, "fit.first_step", "seconds", told, {"xla": given.xla})


def bench_memory(given: argparse.Namespace, show: Show) -> Result:
    """Measure the peak resident memory, each in a fresh process.

    With `shards` the batch is 64 times the model's own: few rows take less memory than the weights' gradients.
    """
    told = ("imported_bytes", "state_bytes")
    return _fresh_processes(
        given, show, "fit.peak_memory", "bytes", told, {"steps": _MEMORY_STEPS, "rows": given.batch_size}
    )


def _fresh_processes(
    given: argparse.Namespace, show: Show, kind: str, key: str, told: Sequence[str], extra: dict[str, Any]
) -> Result:
    rows: list[Row] = []
    notes: list[str] = []
    for model in given.model:
        libraries = ["ncclsync", *given.against]
        sides: dict[str, dict[str, Any]] = {side: {"library": side} for side in libraries}
        if key == "bytes" and (given.shards or given.activations):  # numbers of shards and rows are for each tower
            sides |= {name: {"library": "ncclsync", "shards": n} for name, n in _by_shards(given.shards).items()}
            sides[_ONE_ROW] = {"library": "ncclsync", "rows": 1}
        if key == "bytes" and given.shards:
            extra = {**extra, "rows": given.batch_size or _TO_DIVIDE * BATCH_SIZES[model]}
        answers: dict[str, list[dict[str, Any]]] = {}
        names = {f"{side} × {n}": (side, n) for n in given.towers for side in sides}
        timers = {}
        for name, (side, towers) in names.items():
            answers[name] = []
            own = {what: count * towers if what in ("rows", "shards") else count for what, count in sides[side].items()}
            arguments = {"model": model, "towers": towers, **extra, **own}
            timers[name] = functools.partial(_answer, f"{name}, {model}", kind, arguments, key, answers[name])
        measured = take_turns(timers, given.rounds, about(model, show))
        values = {name: np.array(samples, float) for name, samples in measured.items()}  # [rounds]
        for name, (side, towers) in names.items():
            case = {"model": model, "towers": towers}
            compared = [other for other in libraries if other != side and side in libraries]
            ratios = {other: ratio(values[name], values[f"{other} × {towers}"]) for other in compared}
            single, one_row = f"{side} × 1", f"{_ONE_ROW} × 1"
            if single in values and towers > 1:
                ratios["one tower"] = ratio(values[name], values[single])
            figures: dict[str, Any] = {one: Spread.of([answer[one] for answer in answers[name]]) for one in told}
            if key == "bytes" and single in values:
                state = np.array([answer["state_bytes"] for answer in answers[name]])
                needed = values[single] + (towers - 1) * state
                figures["of_needed"] = ratio(values[name], needed)
                if one_row in values and side == "ncclsync" and towers > 1:
                    figures["beyond"] = ratio(values[name] - needed, values[single] - values[one_row])
            if "shards" in sides[side]:
                beside = values[f"{_ONE_ROW} × {towers}"]
                figures["of_rows"] = ratio(values[name] - beside, values[f"ncclsync × {towers}"] - beside)
            rows.append(Row(case, side, Spread.of(values[name]), ratios, figures))
        notes += _compiled(model, [side for name, (side, _) in names.items() if answers[name][0]["xla"]])
    return Result(given.benchmark, "B" if key == "bytes" else "s", tuple(rows), tuple(notes))


def _by_shards(counts: Sequence[int]) -> dict[str, int]:
    """Return the names of the sides that have so many shards for each tower."""
    return {f"{each} shard{'s' * (each > 1)} a tower": each for each in counts}


def _answer(name: str, kind: str, arguments: dict, key: str, kept: list[dict[str, Any]]) -> float:
    with Side(name, kind, arguments) as side:
        kept.append(side.ask("go"))
    return kept[-1][key]

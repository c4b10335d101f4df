"""A seeded generator of programs: each is run on one device and on N towers, and compared; what fails is made small.

    python tests/support/adversary.py --seeds 0:100 --towers 2,3,5

The parts that it composes stand in `adversary_parts.py`. The numbers of a seed stay as long as the parts do: a program
that fails is printed as a script of its own, with the source of its parts.
"""

import argparse
import collections
import contextlib
import dataclasses
import inspect
import json
import os
import random
import re
import select
import subprocess
import sys
import time
from typing import Any

if __name__ == "__main__":  # pytest's process has tests of GPUs, too
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import adversary_parts
from adversary_parts import PARTS, Part, Program, World, run
from harness import HARMLESS, computing_in, differences, warnings_logged

TOLERANCE = 1e-6  # of float64: a wrong factor stands far above, a sum in another order far below
# Programs that are refused, as README and options say; any other error is a failure.
REFUSED = re.compile(
    r"shard_optimizer|hidden (random )?state|Expected a (random )?state|is drawn from a state|"
    r"no table that the step|unequal numbers of rows|sparse and ragged ones do not|no loop or branch both writes"
)


def drawn(draw: random.Random, kind: str, *names: str) -> Part:
    """Return a part of a kind, one of `names` if these are given, with arguments."""
    name = draw.choice(names or tuple(PARTS[kind]))
    return name, {key: draw.choice(values) for key, values in PARTS[kind][name][1].items()}


def generate(seed: int) -> Program:
    """Return the program of a number."""
    draw = random.Random(seed)
    head = drawn(draw, "head", "vectors") if draw.random() < 0.45 else drawn(draw, "head")
    body = tuple(drawn(draw, "body") for _ in range(draw.choice((1, 1, 2, 2, 3))))
    step = drawn(draw, "step") if draw.random() < 0.45 else ("keras_step", {})
    if step[0] in ("mixed", "input_penalty") and head[0] not in ("vectors", "series", "images"):
        step = ("keras_step", {})  # they compute with dense numbers
    loss = drawn(draw, "loss") if draw.random() < 0.5 else ("cross_entropy", {})
    optimizer = drawn(draw, "optimizer")
    metrics = draw.choice(((), ("accuracy",), ("accuracy", "sparse_categorical_crossentropy")))
    compiled = {}
    if draw.random() < 0.15:
        compiled["steps_per_execution"] = 2
    options: dict[str, Any] = {"exact": True} if draw.random() < 0.65 else {}
    choice = draw.random()
    if choice < 0.1:
        options["shards"] = 6
    elif choice < 0.2:
        options["shares"] = [3, 1, 2, 1, 1]
    elif choice < 0.3 and optimizer[0] in ("adam", "sgd") and not optimizer[1].get("accumulate"):
        options["shard_optimizer"] = True
    elif choice < 0.35:
        options["on_oom"] = "split"
    if draw.random() < 0.15:
        options["health"] = draw.choice(({"check_every": 2}, {"on_nonfinite": "raise"}, {"on_nonfinite": "skip"}))
    if draw.random() < 0.1:
        options["bucket_bytes"] = 64
    # A step between any two acts that change something, so that each change is seen by a step. One way to train and one
    # shape, or two: each is traced by itself, which is what takes the time. What writes is traced by no step.
    acts: list[Part] = []
    uses = {name for name, _ in body} | {step[0], loss[0]}
    writes = ("write",) * 8 + ("files", "fails")
    if uses & {"generator_noise", "coin", "noisy_gradients"} or step[1].get("shuffle") == "generator":
        writes += ("draw",) * 8
    changes = bool(uses & {"attributes", "dialled_huber"})
    writes += ("change",) * (8 if changes else 1)
    writes += ("use_table",) * 5 * ("table" in uses)
    traced = ("evaluate", "predict", "on_batch", "change") + ("lengths",) * 2 * (head[0] in ("tokens", "series"))
    ways = ("train",) if step[0] == "unlabelled" else ("train", "train", "train", "fit", "own_loop")
    way = drawn(draw, "act", draw.choice(ways))
    shape = {"rows": draw.choice((8, 7, 5, 3, 2, 1)), "length": draw.choice((4, 4, 3, 1))}
    shape |= {"batch": draw.choice((shape["rows"], shape["rows"], 3))}

    owns = uses & {"own_scale", "python_writes"} or ("flow", {"how": "cond_writes"}) in body

    def shaped(act: Part, anew: bool = False) -> Part:
        return act[0], {**act[1], **({} if anew else {key: shape[key] for key in shape if key in act[1]})}

    for i in range(draw.choice((2, 3, 4))):
        acts.append(shaped(way, anew=i > 0 and draw.random() < (0.5 if changes else 0.15)))
        if i == 0 and draw.random() < 0.5:
            acts.append(shaped(drawn(draw, "act", *traced), anew=draw.random() < 0.2))
        for _ in range(draw.choice((1, 1, 2))):
            act = drawn(draw, "act", *writes)
            if act[0] == "write" and act[1]["target"] == "own" and not owns:
                act[1]["target"] = draw.choice(("weight", "bias", "rate", "slot"))
            acts.append(act)
    acts.append(shaped(way))
    if draw.random() < 0.06:
        acts.append(drawn(draw, "act", "race"))
    given = tuple(compiled.items()), tuple(options.items()), tuple(acts)
    return Program(seed, head, body, step, loss, optimizer, metrics, *given)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What becomes of a program: ok, skipped (one device fails), refused, told (warned, and differs), or a failure."""

    kind: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether it is to be looked at."""
        return self.kind in ("differs", "raises", "apart", "slow")


def found_by(program: Program, towers: int, eagerly: bool = False) -> tuple[World | None, Exception | None, list[str]]:
    """(what it leaves, its error, what ncclsync has warned of)."""
    with warnings_logged() as messages, computing_in("float64"):
        try:
            return run(program, towers, eagerly), None, messages
        except Exception as error:  # of any type: told by the verdict
            return None, error, messages


def judge(program: Program, towers: int) -> Verdict:
    """Compare a program on towers with one device, which is traced only if it has to be: that takes long."""
    # Without a trace no length is traced anew, and a gradient of TensorFlow's own must know each variable.
    eager = not program.jit and not {"lengths", "overwritten"} & {name for _, name in program.parts()}
    expected, error, _ = found_by(program, 0, eager)
    if expected is None or expected.errors:
        return Verdict("skipped", _told(error) if error else expected.errors[0])
    actual, error, messages = found_by(program, towers)
    if eager and (error is not None or (expected.plain and not actual.errors and _off(actual, expected))):
        expected, failed, _ = found_by(program, 0)
        if expected is None or expected.errors:
            return Verdict("skipped", _told(failed) if failed else expected.errors[0])
    if error is not None:
        if isinstance(error, AssertionError) and re.search("apart|other weights", str(error)):
            return Verdict("apart", _told(error))
        return Verdict("refused" if REFUSED.search(str(error)) else "raises", _told(error))
    if actual.errors:
        return Verdict("raises", actual.errors[0])
    if not expected.plain:
        return Verdict("ok", "a race")
    off = _off(actual, expected)
    if not off:
        return Verdict("ok")
    again, _, _ = found_by(program, 0)
    if again is None or _off(again, expected, TOLERANCE / 10):
        return Verdict("skipped", "one device does not repeat itself")
    told = [message[:150] for message in messages if not HARMLESS.search(message)]
    if told and dict(program.options).get("exact") is not True:
        # A warning may hide another fault: with all exact, nothing may differ, or another warning tells it.
        exact = dataclasses.replace(program, options=tuple({**dict(program.options), "exact": True}.items()))
        verdict = judge(exact, towers)
        return verdict if verdict.failed else Verdict("told", told[0])
    return Verdict("told", told[0]) if told else Verdict("differs", f"{len(off)} differ: {'; '.join(off[:3])}")


def _told(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"


def _off(actual: World, expected: World, tolerance: float = TOLERANCE) -> list[str]:
    off = []
    if len(actual.found) != len(expected.found):
        return [f"{len(actual.found)} results for {len(expected.found)}"]
    for i, ((label, one), (_, other)) in enumerate(zip(actual.found, expected.found, strict=True)):
        off += [f"{i} {label} {line}" for line in differences(one, other, tolerance)]
    return off


def smaller(program: Program):
    """Programs with a part less, or a simpler part."""
    for field in ("acts", "body", "options", "compiled", "metrics"):
        value = getattr(program, field)
        if len(value) > 3:
            yield dataclasses.replace(program, **{field: value[: len(value) // 2]})
            yield dataclasses.replace(program, **{field: value[len(value) // 2 :]})
        for i in range(len(value)):
            yield dataclasses.replace(program, **{field: value[:i] + value[i + 1 :]})
    for field in ("step", "loss", "optimizer", "head"):
        default = getattr(Program(0), field)
        if getattr(program, field) != default:
            yield dataclasses.replace(program, **{field: default})
    for i, (name, arguments) in enumerate(program.acts):
        if name == "fit":
            plain = ("train", {"rows": min(8, arguments["rows"]), "length": 4, "times": 1})
            yield dataclasses.replace(program, acts=(*program.acts[:i], plain, *program.acts[i + 1 :]))


def shrink(program: Program, towers: int, kind: str, tries: int = 60) -> tuple[Program, int]:
    """Return the smallest program found, and number of towers, that still fails in the same way."""
    if towers > 2 and judge(program, 2).kind == kind:
        towers = 2
    found = True
    while found and tries > 0:
        found = False
        for candidate in smaller(program):
            tries -= 1
            if judge(candidate, towers).kind == kind:
                program, found = candidate, True
                break
            if tries <= 0:
                break
    return program, towers


def as_script(program: Program, towers: int, told: str) -> str:
    """A script that runs a program by itself: the sources of its parts, and what they need."""
    lines = inspect.getsource(adversary_parts).splitlines(keepends=True)
    used = set(program.parts())
    for kind, parts in PARTS.items():
        for name, (function, _) in parts.items():
            if (kind, name) not in used:
                source, first = inspect.getsourcelines(function)
                lines[first - 1 : first - 1 + len(source)] = [""] * len(source)
    text = re.sub(r"\n{4,}", "\n\n\n", "".join(lines))
    return f"""{text}

# On {towers} towers: {told}
PROGRAM = {program!r}
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
for (label, one), (_, other) in zip(run(PROGRAM).found, run(PROGRAM, {towers}).found):
    for p, q in zip(keras.tree.flatten(one), keras.tree.flatten(other)):
        same = p.dtype.kind in "OSU" or np.allclose(p, q, 1e-6, 1e-9)
        print(label, "same" if same else f"one device {{np.ravel(p)[:3]}}, towers {{np.ravel(q)[:3]}}")
"""


# The command.


def _work(seeds: range, towers: list[int], jit: Any) -> None:
    """Judge seeds; print a line of JSON for each."""
    for seed in seeds:
        started = time.process_time()
        print(json.dumps({"begun": seed}), flush=True)
        count = towers[seed % len(towers)]
        verdict = judge(dataclasses.replace(generate(seed), jit=jit), count)
        line = {"seed": seed, "towers": count, "kind": verdict.kind, "detail": verdict.detail}
        print(json.dumps({**line, "seconds": round(time.process_time() - started, 1)}), flush=True)


def verdicts(seeds: range, towers: list[int], limit: float, extra: list[str]):
    """Yield a verdict for each seed, by processes that are ended and begun anew where a seed takes too long."""
    next_seed = seeds.start
    while next_seed < seeds.stop:
        command = [sys.executable, __file__, "--seeds", f"{next_seed}:{min(seeds.stop, next_seed + 40)}", *extra]
        command += ["--towers", ",".join(map(str, towers)), "--work"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            while True:
                ready, _, _ = select.select([process.stdout], [], [], limit)
                text = process.stdout.readline() if ready else ""
                if text.startswith("{"):
                    line = json.loads(text)
                    if "kind" in line:
                        yield line
                        next_seed = line["seed"] + 1
                elif not text:
                    break
            process.kill()
        if next_seed < seeds.stop and (not ready or process.returncode not in (0, -9)):
            why = f"no end within {limit:.0f} s" if not ready else f"the process ended: {process.returncode}"
            yield {"seed": next_seed, "towers": towers[next_seed % len(towers)], "kind": "slow", "detail": why}
            next_seed += 1


def main() -> None:
    """Run seeds; print what fails, and what it was made of."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:40", help="A:B, or one number")
    parser.add_argument("--towers", default="2,3,5", help="numbers of towers, taken in turn by the seeds")
    parser.add_argument("--jit", action="store_true", help="let Keras choose XLA as on GPUs")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one program")
    parser.add_argument("--shrink", action="store_true", help="print each failure as a small script")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    first, _, last = chosen.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    towers = [int(one) for one in chosen.towers.split(",")]
    if chosen.jit:
        from keras.src.trainers import trainer

        trainer.Trainer._resolve_auto_jit_compile = trainer.model_supports_jit
    if chosen.work:
        _work(seeds, towers, jit="auto" if chosen.jit else False)
        return
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    for line in verdicts(seeds, towers, chosen.limit, ["--jit"] * chosen.jit):
        counts[line["kind"]] += 1
        failed = Verdict(line["kind"]).failed
        told = f"{line['kind']}: {line['detail']} ({line.get('seconds', chosen.limit)} s)"
        print(f"{line['seed']} on {line['towers']}: {told}", flush=True)
        if failed:
            failures.append(line)
            print(f"    {generate(line['seed'])}", flush=True)
            if chosen.shrink and line["kind"] != "slow":
                small, count = shrink(generate(line["seed"]), line["towers"], line["kind"])
                print(as_script(small, count, line["detail"]), flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    sys.exit(bool(failures))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()

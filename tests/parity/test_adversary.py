"""Programs of the adversary, by their numbers: on towers as on one device, or a warning told it.

`python tests/support/adversary.py --seeds A:B` runs others.
"""

import adversary
import pytest
from adversary import PARTS, Program, Verdict, generate, judge, shrink
from adversary_parts import HOWS

from ncclsync.semantics import rules

TOWERS = (2, 3, 5)
QUICK = (1, 2)  # seeds of cheap programs
SEEDS = range(20)  # of those that the command runs; each takes some five seconds of a core

STEP = ("train", {"rows": 7, "length": 4, "times": 1})
EXACT = (("exact", True),)


def sgd(**options):
    return "sgd", {"momentum": 0.0, "accumulate": None, "clip": {}, **options}


def between(act, *, how, **arguments):
    """An act in each way, and a step behind each."""
    return (STEP, *(each for one in how for each in ((act, {**arguments, "how": one}), STEP)))


def body(*names, **arguments):
    """Layers; the last one has the arguments."""
    return (*((name, {}) for name in names[:-1]), (names[-1], arguments))


# What was met in the field, in the parts of which the adversary composes programs: it can express each.
MET = {
    **{
        f"writes_of_{target}": Program(
            1,
            body=body("own_scale", "running_mean"),
            optimizer=sgd(momentum=0.9),
            acts=between("write", how=HOWS, target=target),
        )
        for target in ("weight", "state", "rate", "iterations", "slot", "own")
    },
    "python_writes": Program(1, body=body("python_writes", function="py_function"), acts=(STEP, STEP)),
    "named_like_a_state": Program(1, body=body("named", name="StateVariance", written=False), acts=(STEP, STEP)),
    "named_like_a_seed": Program(1, body=body("named", name="seed_generator_state_a", written=True), acts=(STEP, STEP)),
    "generator": Program(1, body=body("generator_noise"), acts=(STEP, STEP)),
    "generator_of_gradients": Program(1, step=("noisy_gradients", {}), options=EXACT, acts=(STEP, STEP)),
    "generator_is_used_between_steps": Program(
        1, body=body("coin"), options=EXACT, acts=between("draw", how=PARTS["act"]["draw"][1]["how"])
    ),
    "moments_of_a_whole": Program(
        1, body=(*body("whole", how="numpy_function"), *body("batch_norm", synchronized=False))
    ),
    "moments_of_a_mask": Program(1, body=(*body("whole", how="boolean_mask"), *body("batch_norm", synchronized=False))),
    "overwritten_and_accumulated": Program(1, body=body("overwritten"), optimizer=sgd(accumulate=2), acts=(STEP, STEP)),
    "overwritten_and_sharded": Program(1, body=body("overwritten"), options=(("shard_optimizer", True),), acts=(STEP,)),
    "table": Program(1, body=body("table", find="both"), acts=(STEP, STEP)),
    "queue_grows": Program(1, body=body("queue"), acts=(STEP, STEP)),
    "attribute": Program(
        1,
        body=body("attributes"),
        acts=(STEP, ("change", {"what": "factor"}), ("train", {"rows": 5, "length": 4, "times": 1})),
    ),
    "global": Program(
        1,
        body=body("attributes"),
        acts=(STEP, ("change", {"what": "global"}), ("train", {"rows": 5, "length": 4, "times": 1})),
    ),
    "loss_delta": Program(
        1,
        loss=("dialled_huber", {"delta": 1.0}),
        acts=(STEP, ("change", {"what": "delta"}), ("train", {"rows": 5, "length": 4, "times": 1})),
    ),
    "clipvalue": Program(
        1, acts=(STEP, ("change", {"what": "clipvalue"}), ("train", {"rows": 5, "length": 4, "times": 1}))
    ),
    "lengths": Program(
        1,
        head=("tokens", {"cell": "gru", "masked": False}),
        body=body("across", how="mean"),
        acts=(("lengths", {"how": "train"}),),
    ),
    "beam": Program(1, body=body("flow", how="beam"), acts=(STEP,)),
    "rate_in_a_thread": Program(1, acts=(STEP, ("race", {"rows": 8, "what": "rate"}))),
    "predict_in_a_thread": Program(1, acts=(STEP, ("race", {"rows": 8, "what": "predict"}))),
}

# Of random numbers and moments of a tower's own; of Python that writes while a step runs.
TOLD = ("generator", "moments_of_a_mask", "moments_of_a_whole", "python_writes")


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", MET)
def test_what_was_met_in_the_field(name):
    """It is as on one device, or a warning tells it."""
    verdict = judge(MET[name], 2)
    assert verdict.kind == "ok" or (verdict.kind == "told" and name in TOLD), verdict


@pytest.mark.parametrize(
    "seed", [seed if seed in QUICK else pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS]
)
def test_program_is_as_on_one_device(seed):
    """A program, on a number of towers that its seed chooses."""
    verdict = judge(generate(seed), TOWERS[seed % len(TOWERS)])
    assert not verdict.failed, f"{verdict}; python tests/support/adversary.py --seeds {seed} --shrink"


def test_programs_are_told_by_their_numbers():
    """A seed means one program, and each part is met by some seed."""
    assert generate(7) == generate(7) != generate(8)
    met = {part for seed in range(600) for part in generate(seed).parts()}
    assert met == {(kind, name) for kind, parts in adversary.PARTS.items() for name in parts}


def test_a_false_rule_is_found(monkeypatch):
    """The comparison can fail."""
    monkeypatch.setitem(rules.LINEAR, "Square", lambda call: call.inputs[:1])
    verdict = judge(Program(1, body=GUILTY), 2)
    assert verdict.kind == "differs" and "train loss" in verdict.detail


GUILTY = body("extra_loss", how="square")


def test_what_fails_is_made_small(monkeypatch):
    """It is shrunk to what makes it fail, and printed as a script with the parts that it needs."""
    monkeypatch.setattr(
        adversary, "judge", lambda program, _: Verdict("differs" if GUILTY[0] in program.body else "ok")
    )
    program = Program(1, ("sparse", {}), (*body("normal", make="LayerNormalization"), *GUILTY), acts=(STEP,) * 5)
    small, towers = shrink(program, 5, "differs")
    assert (small, towers) == (Program(1, body=GUILTY), 2)
    script = adversary.as_script(small, towers, "differs")
    compile(script, "script", "exec")
    assert "def extra_loss" in script and "def normal" not in script


@pytest.mark.parametrize(("off", "kind"), [((), "ok"), ((False,), "told"), ((False, True), "differs")])
def test_a_warning_hides_no_other_fault(monkeypatch, off, kind):
    """What differs and was told is asked again where all is exact."""

    def found_by(program, towers, eagerly=False):
        made = adversary.World(1)
        exact = dict(program.options).get("exact", False)
        made.keep("loss", 2.0 if towers and exact in off else 1.0)
        return made, None, [] if exact else ["3 towers do not train as one device"]

    monkeypatch.setattr(adversary, "found_by", found_by)
    assert judge(Program(1), 3).kind == kind

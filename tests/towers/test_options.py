"""`TowerOptions`: every option stands once, and who takes options has just these."""

import ast
import dataclasses
import inspect
import pathlib
import re

import numpy as np
import pytest

import ncclsync
from ncclsync import nccl_parallel, parallel
from ncclsync.parallel import ModelOptions
from ncclsync.towers.options import Health, TowerOptions, written

DEFAULTS = {field.name: field.default for field in dataclasses.fields(ModelOptions)}
README = pathlib.Path(__file__).parents[2] / "README.md"
OF_TOWERS = [field.name for field in dataclasses.fields(TowerOptions)]


def documented(text: str, indent: int) -> list[str]:
    """Return what a docstring describes, in its order."""
    return re.findall(rf"^ {{{indent}}}(\w+): ", text, re.MULTILINE)


def test_each_option_is_documented_once():
    """In the order of the fields; a class describes its own."""
    assert documented(TowerOptions.__doc__, 8) == OF_TOWERS
    assert documented(ModelOptions.__doc__, 8) == list(DEFAULTS)[len(OF_TOWERS) :]
    assert documented(Health.__doc__, 8) == [field.name for field in dataclasses.fields(Health)]


def test_help_shows_every_option():
    """Of the decorator and of `Towers`: in the signature, with its default, and in the text."""
    assert documented(nccl_parallel.__doc__, 8)[: len(DEFAULTS) + 1] == ["factory", *DEFAULTS]
    assert documented(ncclsync.Towers.__init__.__doc__, 12) == OF_TOWERS
    for taker, names in ((nccl_parallel, list(DEFAULTS)), (ncclsync.Towers, OF_TOWERS)):
        shown = dict(inspect.signature(taker).parameters)
        shown.pop("factory", None)
        assert {name: one.default for name, one in shown.items()} == {name: DEFAULTS[name] for name in names}


def test_type_checkers_see_every_option():
    """The decorator's overload, written out for them, has the fields' types and defaults."""
    written = {}
    for cls in (TowerOptions, ModelOptions):
        body = ast.parse(inspect.getsource(cls)).body[0].body
        fields = [node for node in body if isinstance(node, ast.AnnAssign)]
        written |= {one.target.id: (ast.unparse(one.annotation), ast.unparse(one.value)) for one in fields}
    functions = [node for node in ast.parse(inspect.getsource(parallel)).body if isinstance(node, ast.FunctionDef)]
    [overload] = [one.args for one in functions if one.name == "nccl_parallel" and len(one.args.kwonlyargs) > 1]
    pairs = zip(overload.kwonlyargs, overload.kw_defaults, strict=True)
    assert {a.arg: (ast.unparse(a.annotation), ast.unparse(value)) for a, value in pairs} == written


def test_readme_has_a_row_for_every_option():
    """With its default."""
    section = README.read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|")[:2] for line in section.splitlines() if line.startswith("| `")]
    found = {name.strip(" `"): eval(default.strip(" `"), {"Health": Health}) for name, default in rows}
    assert found == {**DEFAULTS, **dataclasses.asdict(Health())}


@pytest.mark.parametrize("taker", [nccl_parallel, ncclsync.Towers])
def test_an_unknown_option_is_the_takers_error(taker):
    """As if it had listed them itself."""
    with pytest.raises(
        TypeError, match=rf"^{taker.__name__}\(\) got an unexpected keyword argument 'none'. Known are:"
    ):
        taker(none=2)


def test_health_says_what_to_write():
    """Of a near name, and of a dictionary."""
    with pytest.raises(TypeError, match=r"^Health\(\) got an .* 'checkevery'. Write check_every=5$"):
        Health(checkevery=5)
    with pytest.raises(TypeError, match=r"Received: {'check_every': 5}. Write health=ncclsync.Health\(check_every=5\)"):
        nccl_parallel(health={"check_every": 5})
    with pytest.raises(TypeError, match=r"Write timeout_s=5$"):
        nccl_parallel(health={"timeout": 5})


def test_what_needs_a_model_is_no_option_of_towers():
    """It would have no effect."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'recipe'"):
        ncclsync.Towers(2, recipe=None)


@pytest.mark.parametrize(
    "old, new",
    [
        ({"sync_batch_norm": True}, 'exact=("batch_norm",)'),
        ({"batch_invariant_random": True}, 'exact=("random",)'),
        ({"check_first_step": True}, "python -m ncclsync verify"),
        ({"shards_at_once": 2}, "shards=2"),
        ({"tower": 2}, "towers=2"),
        ({"gpus": 2}, "towers=2"),
        ({"num_towers": 2}, "towers=2"),
        ({"n_gpus": 2}, "towers=2"),
        ({"device": ["GPU:0"]}, "devices=['GPU:0']"),
        ({"compresion": "bfloat16"}, "compression='bfloat16'"),
        ({"batch_size": 64}, "fit(batch_size=...)"),
        ({"chek_every": 9}, "health=ncclsync.Health(check_every=9)"),
        ({"on_nonfinite": "skip"}, "health=ncclsync.Health(on_nonfinite='skip')"),
        ({"timeout_s": 5}, "health=ncclsync.Health(timeout_s=5)"),
    ],
)
def test_an_old_name_is_an_error_that_says_the_new_one(old, new):
    """By the decorator, and by `Towers`."""
    for taker in (nccl_parallel, ncclsync.Towers):
        with pytest.raises(TypeError, match=re.escape(f"unexpected keyword argument {next(iter(old))!r}. Write {new}")):
            taker(**old)


@pytest.mark.parametrize("exact", ["random", ("dropout",), 1, None])
def test_exact_is_a_bool_or_some_of_its_words(exact):
    with pytest.raises(ValueError, match="Expected exact to be a bool or a tuple of some of"):
        nccl_parallel(exact=exact)


@pytest.mark.parametrize(
    "exact, found", [(True, (1, 1)), (False, (0, 0)), (("random",), (0, 1)), (["batch_norm"], (1, 0))]
)
def test_exact_is_of_both_or_of_one(exact, found):
    options = TowerOptions(exact=exact)
    assert (options.exact_batch_norm, options.exact_random) == found


def test_the_decorator_has_few_options():
    """A newcomer reads all of them."""
    assert len(DEFAULTS) <= 13


@pytest.mark.parametrize(
    "name", [name for name, default in DEFAULTS.items() if isinstance(default, bool) and name != "exact"]
)
def test_flags_are_bools(name):
    """Of the towers too, not of the decorator only."""
    kind = TowerOptions if name in OF_TOWERS else ModelOptions
    with pytest.raises(TypeError, match=f"Expected {name} to be a bool. Received: 1. Write {name}=[TF]"):
        kind(**{name: 1})


def test_options_do_not_change():
    """Who holds them may rely on what was checked."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        TowerOptions(towers=2).towers = 3
    given = {"devices": ["CPU:0"], "shares": [3], "exact": ["random"]}
    options = TowerOptions(**given)
    for name, value in given.items():
        was = tuple(value)
        value.append(value[0])
        assert getattr(options, name) == was


def test_numbers_may_be_numpys():
    """As a scheduler's or a sweep's are; a session compares and prints Python's."""
    given = {
        "towers": np.int64(2),
        "bucket_bytes": np.uint32(1 << 20),
        "shares": [np.int32(3), 1],
        "exact": np.bool_(True),
        "health": ncclsync.Health(check_every=np.int16(5), timeout_s=np.float32(60), preflight=np.bool_(False)),
    }
    options = TowerOptions(**given)
    found = [getattr(options, name) for name in given if name != "health"]
    found += [*options.shares, options.health.check_every, options.health.timeout_s, options.health.preflight]
    assert repr(found) == "[2, 1048576, (3, 1), True, 3, 1, 5, 60.0, False]"
    assert TowerOptions(shares=np.array([1, 2])).shares == (1, 2)
    assert TowerOptions(shards=np.int64(4)).shards == 4
    with pytest.raises(TypeError, match=r"Expected towers to be an int\. Received: 2.0 of type float"):
        TowerOptions(towers=np.float64(2))
    ncclsync.Timeline("never.json", steps=(np.int64(1), np.int64(2)))
    ncclsync.LargeBatch(np.int64(8), np.float32(1))
    ncclsync.NoiseScale(np.float32(0.5))


def test_options_as_they_are_written():
    """Without defaults; what is written makes the same options."""
    options = TowerOptions(towers=3, exact=("random",), health=Health(check_every=7))
    assert written(options) == "towers=3, exact=('random',), health=ncclsync.Health(check_every=7)"
    assert (
        eval(f"TowerOptions({written(options)})", {"TowerOptions": TowerOptions, "ncclsync": ncclsync}) == options
        and written(TowerOptions()) == ""
    )
    with pytest.raises(ValueError, match=r'Write exact=\("batch_norm",\)'):
        TowerOptions(exact="batchnorm")

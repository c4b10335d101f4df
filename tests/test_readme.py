"""What documents say is true as far as a test can read: blocks parse, names exist, links lead somewhere.

Programs of documents run in `test_examples.py`, `diff` blocks in `test_coming_from.py`; `test_options.py`
compares README's table of options.
"""

import argparse
import ast
import importlib
import inspect
import json
import re
import shlex
import subprocess
import textwrap

import pytest
from documents import PAGES, ROOT, anchors, blocks, prose, read

from ncclsync import nccl_parallel
from ncclsync.tools import cli

LANGUAGES = {"python", "sh", "diff", "text"}
FOLDERS = ("", "ncclsync", "ncclsync/semantics", "ncclsync/tools", "csrc", "tests", "examples")


def no_such(names, exists):
    """Return which of the names do not exist."""
    return sorted(name for name in set(names) if not exists(name))


def is_there(dotted):
    """Return whether a name that begins with the package leads to a module or to what a module has."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_every_folder_has_its_page():
    """Documents stand where the reader stands; README is short."""
    pages = {str(page) for page in PAGES}
    assert pages >= {f"{folder}/README.md".lstrip("/") for folder in FOLDERS} | {"CHANGELOG.md"}
    assert len(read("README.md").splitlines()) <= 150


def test_blocks_are_of_known_languages():
    """No block is of a language that nobody looks at; no fence is left open."""
    for page in PAGES:
        fences = len(re.findall(r"^```", read(page), flags=re.MULTILINE))
        assert fences == 2 * len([block for block in blocks() if block.page == page]), page
    assert {block.language for block in blocks()} <= LANGUAGES
    assert {str(block.page) for block in blocks("diff")} == {"examples/coming_from.md"}


@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in blocks("python")])
def test_python_compiles(block):
    """As it stands, its indentation aside."""
    ast.parse(textwrap.dedent(block.text))


@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in blocks("sh")])
def test_shell_parses(block):
    """A shell reads all of it."""
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_options_exist(page):
    """Those that a document gives to the decorator."""
    flat = re.sub(r"(?<!nccl_parallel)\([^()]*\)", "", read(page))  # without calls among the arguments
    calls = re.findall(r"nccl_parallel\((\w+=[^)]*)", flat)
    named = [name for call in calls for name in re.findall(r"(\w+)=", call)]
    assert not no_such(named, inspect.signature(nccl_parallel).parameters.__contains__)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_names_exist(page):
    """Everything that begins with `ncclsync.`; of the changelog's table of moves, the new side."""
    text = re.sub(r"^ *\| `ncclsync\.[^|]*\|", "|", read(page), flags=re.MULTILINE)
    names = re.findall(r"(?<![\w./\"-])ncclsync(?:\.[A-Za-z]\w*)+(?![\w/])", text)
    assert not no_such([name for name in names if name not in ("ncclsync.h", "ncclsync.c")], is_there)


def test_missing_names_are_found():
    """The checks above can fail."""
    assert not is_there("ncclsync.towers.no_such") and not is_there("ncclsync.no_such.module")
    assert is_there("ncclsync.tools.bench.models.resnet50") and is_there("ncclsync.Towers")
    assert no_such(["a", "b"], {"a"}.__contains__) == ["b"]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    """Files and folders exist, and headings in them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page.parent / name).resolve() if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(path.relative_to(ROOT)), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_exist(page):
    """Those that a document names, from the root, from its own folder or from the package."""
    words = re.findall(r"(?<![\w/~.-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|sh|h|ipynb)\b", read(page))
    named = [word for word in words if "/" in word and "my_package" not in word]
    homes = (ROOT, ROOT / page.parent, ROOT / "ncclsync", ROOT / "tests")
    assert not no_such(named, lambda word: any((home / word).exists() for home in homes))


def commands():
    """Return each command of the `sh` blocks, a line each."""
    return [line for block in blocks("sh") for line in block.text.splitlines() if line.strip()]


def understood(monkeypatch, arguments):
    """Return whether ncclsync's command line takes these arguments."""
    seen, parse = [], argparse.ArgumentParser.parse_args

    def parse_only(self, given):
        seen.append(parse(self, given))
        return argparse.Namespace(run=lambda given: 0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    return cli.main(arguments) == 0 and seen[0].command == arguments[0]


@pytest.mark.parametrize("line", [pytest.param(line, id=line[:60]) for line in commands()])
def test_command(monkeypatch, line):
    """A command of ours is understood, with its options; files that it names are there."""
    command = shlex.split(line, comments=True)
    for word in command:
        if re.fullmatch(r"(examples|tests)/[\w/]+(\.py)?", word):
            assert (ROOT / word).exists()
    while "=" in command[0]:
        command = command[1:]
    if command[:2] == ["mpirun", "-np"]:
        command = command[3:]
    if command[:3] == ["python", "-m", "ncclsync"]:
        assert understood(monkeypatch, command[3:])
    else:
        tools = r"cc|mpirun|\./check_cpu|python3?|(\.venv/bin/)(python|pip|ruff|mypy)|\.ci/\w+"
        assert re.fullmatch(tools, command[0]), command


def test_commands_in_prose_exist(capsys):
    """`python -m ncclsync COMMAND`, and of the tools' page every option."""
    helps = {}
    for command in (
        "verify",
        "doctor",
        "plan",
        "run",
        *(f"bench {name}" for name in ("all-reduce", "overlap", "step", "memory")),
    ):
        with pytest.raises(SystemExit):
            cli.main([*command.split(), "--help"])
        helps[command] = capsys.readouterr().out
    known = {word.partition(" ")[0] for word in helps}
    for page in PAGES:
        named = re.findall(r"`python -m ncclsync (\w+)", prose(page))
        assert not no_such(named, known.__contains__), page
    options = re.findall(r"`(--[\w-]+)", prose("ncclsync/tools/README.md"))
    assert len(options) > 10
    assert not no_such(options, lambda name: name == "--help" or f"{name} " in " ".join(helps.values()))


@pytest.mark.parametrize(("name", "has_run"), [("quickstart.ipynb", True), ("two_gpus.ipynb", False)])
def test_notebook(name, has_run):
    """It holds the outputs of one run from the top, or none; its text's links lead somewhere, its code compiles."""
    notebook = json.loads(read(f"examples/{name}"))
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in codes]
    assert counts == ([*range(1, len(codes) + 1)] if has_run else [None] * len(codes))
    assert bool([cell for cell in codes if cell["outputs"]]) == has_run
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and not text.startswith("%"):
            ast.parse(text)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            assert target.startswith("https://") or (ROOT / "examples" / target).exists()

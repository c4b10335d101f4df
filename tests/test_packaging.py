"""What an index, a shell, GitHub and Docker are given."""

import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from documents import prose

from ncclsync.tools import cli

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
GITHUB = ROOT / ".github"


def test_the_index_shows_no_relative_link_or_image():
    """Its page has no files beside it; its program is README's."""
    text = re.search(r'^text = """$(.*?)^"""$', PROJECT, flags=re.DOTALL | re.MULTILINE)[1]
    assert [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("https://")] == []
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert program in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_console_command(monkeypatch, capsys):
    """It is the module's main, and calls itself by its name."""
    module, function = re.search(r'^ncclsync = "(.+):(.+)"$', PROJECT, flags=re.MULTILINE).groups()
    assert getattr(importlib.import_module(module), function) is cli.main
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ncclsync", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out.startswith("usage: ncclsync ")


def test_a_script_beside_the_clone(tmp_path):
    """A folder named `ncclsync`, as the clone's, is not taken for the package."""
    (tmp_path / "ncclsync").mkdir()
    script = tmp_path / "train.py"
    script.write_text("import ncclsync\nprint(ncclsync.__file__)")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(ROOT / "ncclsync" / "__init__.py") or "site-packages" in done.stdout, done.stderr


def test_pages_and_forms_of_github():
    """Links lead somewhere; forms ask for what a report needs; a workflow that was never run says so."""
    for page in ("CONTRIBUTING.md", "SECURITY.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(pathlib.Path(".github", page))):
            assert (GITHUB / target).exists(), target
    forms = [path.read_text() for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 2
    for form in forms:
        assert re.match(r"name: .+\ndescription: .+\n", form) and "python -m ncclsync doctor" in form
    assert all("has never been run" in path.read_text() for path in (GITHUB / "workflows").glob("*.yml"))


def test_dockerfile():
    """hadolint finds nothing, where it is installed; what it copies and installs is there."""
    path = ROOT / "examples/Dockerfile"
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^FROM nvidia/cuda:[\w.-]+$", text, flags=re.MULTILINE)
    for extra in re.findall(r"/opt/ncclsync\[(\w+)\]", text):
        assert re.search(rf"^{extra} = \[", PROJECT, flags=re.MULTILINE)
    if hadolint := shutil.which("hadolint", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"):
        done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr

"""The shape of the project: which module may import which, what lies where, what is documented.

Everything is read from the source text by `ast`; nothing here imports TensorFlow.
"""

import ast
import functools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import ncclsync

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "ncclsync"

# A package imports from rows above its own, never from its own row or from below: so there is no cycle.
ROWS = (
    ("errors",),
    ("communicator", "compat"),
    ("ops",),
    ("sharding",),
    ("semantics",),
    ("costs",),
    ("gradients", "program"),
    ("host_passes",),
    ("towers",),
    ("training",),
    ("parallel",),
    ("tools",),
)
ROW_OF = {package: row for row, packages in enumerate(ROWS) for package in packages}
OPTIONAL = "host_passes"  # the rest works without it
ENTRIES = ("__init__", "__main__")  # what the user names, and so imported by nobody
MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for file in PACKAGE.rglob("*.py")
}

MOST_PARAMETERS = 7
# The decorator's options are written out for type checkers and editors.
MAY_BE_WIDE = {"parallel.nccl_parallel"}

TOP_LEVEL = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "ncclsync", "csrc", "tests", "examples"}


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Return the package's modules by name, those of a package within it with a dot."""
    return {module_name(file): ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")}


def module_name(file: pathlib.Path) -> str:
    """Return `a.b` for `a/b.py`, and `a` for `a/__init__.py`."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield all that a module imports, in functions too, as dotted names: `from a import b` is `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            if node.level:  # meant as of the package itself: those within it import by their full names
                home = f"ncclsync.{home}".rstrip(".")
            yield from (f"{home}.{alias.name}" for alias in node.names)


def imported_modules(tree: ast.AST) -> set[str]:
    """Return which modules of the package a module imports; a name of the package's own is `__init__`'s."""
    found = set()
    for name in imported_names(tree):
        first, _, rest = name.partition(".")
        if first == "ncclsync":
            names = rest.split(".")
            paths = [".".join(names[:length]) for length in range(len(names), 0, -1)]
            found.add(next((path for path in paths if path in MODULES or path == "_native"), "__init__"))
    return found


def package_of(module: str) -> str:
    """Return what of the table a module belongs to."""
    return module.partition(".")[0]


def upward_imports(name: str, tree: ast.AST) -> set[str]:
    """Return what a module imports from its own row or from above it, its own package aside."""
    own = package_of(name)
    others = {module: package_of(module) for module in imported_modules(tree) - {"_native"}}
    return {
        module
        for module, package in others.items()
        if package in ENTRIES or (package != own and ROW_OF[package] >= ROW_OF[own])
    }


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules that import themselves, by way of others."""
    left = dict(imports)
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    return sorted(left)


def foreign_interfaces(tree: ast.AST) -> set[str]:
    """Return what a module uses of TensorFlow and Keras that they keep private, as far as the text tells.

    That is: their internal packages, attributes with a leading underscore which the module does not define itself,
    and arguments of such names.
    """
    found = {name for name in imported_names(tree) if name.startswith(("tensorflow.python", "keras.src"))}
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    defined.add("_replace")  # a named tuple's, which Python documents
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined.add(node.attr)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and (node.arg or "").startswith("_"):
            found.add(node.arg)
        if not isinstance(node, ast.Attribute):
            continue
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        if private and node.attr not in defined:
            found.add(ast.unparse(node))
        if ast.unparse(node) in ("tf.python", "keras.src"):
            found.add(ast.unparse(node))
    return found


def undocumented(tree: ast.Module) -> set[str]:
    """Return the public functions, classes and methods without a docstring."""
    found = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
                continue
            if ast.get_docstring(node) is None:
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return found


def wide_functions(name: str, tree: ast.AST) -> set[str]:
    """Return the functions with more than `MOST_PARAMETERS`, `self` and `**options` aside."""
    return {
        f"{name}.{node.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for arguments in [[*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
        if len([one for one in arguments if one.arg not in ("self", "cls")]) > MOST_PARAMETERS
    }


def test_every_module_has_its_row():
    """A new package is entered in the table, a deleted one leaves it."""
    found = {package_of(name) for name in sources()}
    assert {*found, OPTIONAL} == {*ROW_OF, *ENTRIES}


def test_imports_point_downward():
    """No package imports from its own row or from above."""
    modules = {name: tree for name, tree in sources().items() if name not in ENTRIES}
    wrong = {name: found for name, tree in modules.items() if (found := upward_imports(name, tree))}
    assert wrong == {}


def test_no_modules_import_each_other():
    """Within a package too, modules can be put in an order."""
    assert circles({name: imported_modules(tree) - {name} for name, tree in sources().items()}) == []


def test_a_circle_is_found():
    """The check above can fail."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "planted",
    [
        "from ncclsync.training.keras_model import attach",
        "from ncclsync import towers",
        "import ncclsync.parallel",
        "from ncclsync import nccl_parallel",
        "from .layout import lay_out",
        "from . import shard",
        "def late():\n    from ncclsync.program.cut import cut",
    ],
)
def test_an_upward_import_is_found(planted):
    """The check above can fail: each of these is upward for `sharding.shards`."""
    assert upward_imports("sharding.shards", ast.parse(planted))


def test_only_native_imports_the_extension():
    """Every native call goes through one module, and so through one check."""
    assert {name for name, tree in sources().items() if "_native" in imported_modules(tree)} == {"communicator.native"}


def test_only_compat_uses_private_interfaces():
    """What TensorFlow and Keras may change at will stands in one file for each."""
    wrong = {name: found for name, tree in sources().items() if (found := foreign_interfaces(tree))}
    assert {package_of(name) for name in wrong} == {"compat"}, wrong


@pytest.mark.parametrize(
    "planted",
    [
        "from tensorflow.python.framework import ops",
        "import keras.src.backend",
        "def f(model): return model._symbolic_build()",
        "def f(): return tf.python.eager",
        "def f(callback): return replaced(callback, _load_model=None)",
    ],
)
def test_a_private_interface_is_found(planted):
    """The check above can fail."""
    assert foreign_interfaces(ast.parse(planted))


@pytest.mark.parametrize("module", ["ncclsync", "ncclsync.communicator"])
def test_no_tensorflow_is_imported(module):
    """The package and its communicators serve programs without TensorFlow."""
    code = f"import sys, {module}; print(sorted({{'tensorflow', 'keras'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_every_module_and_public_name_is_documented():
    """Modules, public functions, public classes and their public methods."""
    missing = {name for name, tree in sources().items() if ast.get_docstring(tree) is None}
    missing |= {f"{name}.{found}" for name, tree in sources().items() for found in undocumented(tree)}
    assert missing == set()


def test_undocumented_names_are_found():
    """The check above can fail."""
    planted = "def f(): pass\nclass C:\n    'Doc.'\n    def m(self): pass\n    def _p(self): pass"
    assert undocumented(ast.parse(planted)) == {"f", "C.m"}


def test_functions_take_few_parameters():
    """What needs more is given a dataclass."""
    found = {wide for name, tree in sources().items() for wide in wide_functions(name, tree)}
    assert found == MAY_BE_WIDE


def test_a_wide_function_is_found():
    """The check above can fail."""
    methods = "def wide(self, a, b, /, c, d, *e, f, g, h, i, **j): ...\ndef ok(self, a, b, c, d, e, f, g): ..."
    assert wide_functions("m", ast.parse(methods)) == {"m.wide"}


def test_version_is_the_same_everywhere():
    """In the package's metadata, in Python, and as the changelog's newest entry."""
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    newest = re.search(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert declared is not None and newest is not None
    assert declared[1] == ncclsync.__version__ == newest[1]


def test_top_level_holds_nothing_else():
    """A newcomer meets these names and no others; tools' own files have a leading dot."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


def test_readme_begins_with_its_two_commands():
    """First the example, then the tests, each complete from a fresh virtual environment on."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)[:2]
    assert all("python3 -m venv .venv" in block and "pip install -e" in block for block in (first, second))
    assert "examples/digits.py --towers 4" in first
    assert "pytest" in second


def test_build_without_a_compiler_says_so(tmp_path):
    """One sentence that names what is missing and how to get it."""
    pytest.importorskip("setuptools", minversion="77")
    command = ["build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", "import setuptools; setuptools.setup()", *command],
        cwd=ROOT,
        env=os.environ | {"CC": "no-such-compiler"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode != 0
    assert "Expected a C compiler to build ncclsync. Received: none ('no-such-compiler'" in done.stderr

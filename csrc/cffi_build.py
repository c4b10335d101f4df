"""Build ncclsync's cffi extension and source archive. Used by ``pyproject.toml`` only.

The binding is generated from the header: the part of ``ncclsync.h`` between the "cdef" marks is
what cffi reads, so that C and Python cannot disagree.
"""

from __future__ import annotations

import pathlib
import shutil
import zlib

import cffi
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import SetupError

HEADER = pathlib.Path("csrc/ncclsync.h")

# Sources, and the pages beside them.
ARCHIVED = {".c", ".cc", ".h", ".py", ".md", ".ipynb", ".svg", ".png", ".sh", ".sbatch"}

# C may call it: native.py defines it.
PYTHON_FUNCTIONS = 'extern "Python" void ncs_hear_span(void* context, int span, int ends, int64_t value);\n'


def read_cdef(header: pathlib.Path = HEADER) -> str:
    """Return the declarations between the header's marks."""
    _, _, after = header.read_text(encoding="utf-8").partition("/* cdef begin */")
    declarations, mark, _ = after.partition("/* cdef end */")
    if not mark:
        raise SetupError(f"Expected the marks 'cdef begin' and 'cdef end'. Received: {header}")
    return declarations + PYTHON_FUNCTIONS


def checksum(folder: pathlib.Path = HEADER.parent) -> int:
    """Return the checksum of all C sources. The extension holds it; native.py compares it with the clone's."""
    found = 0
    for file in sorted(folder.rglob("*.[ch]")):
        found = zlib.crc32(file.read_bytes(), found)
    return found


class BuildNative(build_ext):
    """Generate the binding's C file and compile it with the C library into one extension."""

    def build_extensions(self) -> None:
        """Compile, or say in one sentence which compiler is missing."""
        command = getattr(self.compiler, "compiler_so", None) or ["cc"]
        if shutil.which(command[0]) is None:
            raise SetupError(
                f"Expected a C compiler to build ncclsync. Received: none ({command[0]!r} is not "
                "on the PATH). Install one, e.g. by 'apt-get install gcc', or name it in CC."
            )
        super().build_extensions()

    def build_extension(self, ext) -> None:
        """Compile all of ``csrc`` and the generated file; again if any of them, or a header, is newer."""
        ffi = cffi.FFI()
        ffi.cdef(f"{read_cdef()}#define NCS_SOURCES {checksum()}\n")
        ffi.set_source(ext.name, f'#include "{HEADER.name}"\n#define NCS_SOURCES {checksum()}')
        generated = pathlib.Path(self.build_temp, ext.name.rpartition(".")[2] + ".c")
        generated.parent.mkdir(parents=True, exist_ok=True)
        ffi.emit_c_code(str(generated))
        ext.sources = [*map(str, sorted(HEADER.parent.rglob("*.c"))), str(generated)]
        ext.depends = [*map(str, sorted(HEADER.parent.rglob("*.h")))]
        super().build_extension(ext)


class SourceArchive(sdist):
    """Add what setuptools leaves out by itself: headers, this file, all tests and the examples."""

    def make_release_tree(self, base_dir, files) -> None:
        """Copy, with every source of these folders."""
        # Not add_defaults(): setuptools asks another class for the defaults.
        for folder in ("csrc", "ncclsync", "tests", "examples"):
            found = sorted(pathlib.Path(folder).rglob("*.*"))
            files = [*files, *(str(file) for file in found if file.suffix in ARCHIVED)]
        super().make_release_tree(base_dir, sorted({*files, "CHANGELOG.md"}))

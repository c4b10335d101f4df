"""What we declare of NCCL is what the nccl.h of the installed wheel declares."""

import importlib.util
import pathlib
import re
import subprocess

import pytest
from standin import COMPILER

CSRC = pathlib.Path(__file__).parents[2] / "csrc"


def read_without_comments(path: pathlib.Path) -> str:
    """Return a C file's text without comments."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def tidy(declaration: str) -> str:
    """Return C text with one spelling of spaces, pointers and empty parameter lists."""
    text = re.sub(r"\s*([*(),])\s*", r"\1", re.sub(r"\s+", " ", declaration))
    return text.replace("(void)", "()").strip()


@pytest.fixture(scope="module")
def header_path() -> pathlib.Path:
    """NVIDIA's header."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else []:
        path = pathlib.Path(folder, "nccl", "include", "nccl.h")
        if path.is_file():
            return path
    pytest.skip("nvidia-nccl-cu12 is not installed: there is no nccl.h to compare with")


@pytest.fixture(scope="module")
def nccl_header(header_path) -> str:
    """Its text."""
    return read_without_comments(header_path)


def our_values() -> dict[str, int]:
    """Every enumerator of the three enums."""
    text = read_without_comments(CSRC / "ncclsync.h")
    return {name: int(value) for name, value in re.findall(r"\b(nccl\w+) = (\d+)", text)}


def our_prototypes() -> dict[str, str]:
    """Every function of NCCL that is loaded, as one prototype."""
    text = re.sub(r"\\\n", " ", read_without_comments(CSRC / "nccl" / "api.h"))
    rows = re.findall(r"\bX\(([^,]+), (nccl\w+), (\([^)]*\))\)", text)
    return {name: tidy(f"{kind} {name}{parameters}") for kind, name, parameters in rows}


def test_tables_are_read():
    """The patterns above do find our declarations: an empty comparison would pass."""
    assert len(our_values()) == 9 + 10 + 5
    assert len(our_prototypes()) == 17


def test_every_value_is_nccls(nccl_header):
    """Statuses, dtypes and operations have the numbers of nccl.h."""
    theirs = dict(re.findall(r"\b(nccl\w+)\s*=\s*(\d+)\b", nccl_header))
    assert {name: int(theirs[name]) for name in our_values()} == our_values()


def test_every_status_and_operation_is_declared(nccl_header):
    """None that NCCL can return, or offers, is missing. (Of the dtypes we leave out float8.)"""
    for enum, end in (("ncclResult_t", "ncclNumResults"), ("ncclRedOp_t", "ncclNumOps")):
        body = re.search(r"typedef enum \{([^{}]*)\}\s*" + enum + ";", nccl_header).group(1)
        names = re.findall(r"\b(nccl\w+)\s*=", body)
        assert set(names[: names.index(end)]) <= set(our_values())


def test_every_prototype_is_nccls(nccl_header):
    """Return types and parameters of every loaded function are those of nccl.h."""
    declarations = re.findall(r"([\w ]+[\w*]\s+\*?)\b(nccl\w+)\s*(\([^()]*\))\s*;", nccl_header)
    theirs = {name: tidy(f"{kind} {name}{args}") for kind, name, args in declarations}
    assert {name: theirs.get(name) for name in our_prototypes()} == our_prototypes()


def test_a_difference_would_be_noticed(nccl_header):
    """The comparison itself can fail: another parameter type is another prototype."""
    assert tidy("int f( const  void *a )") == tidy("int f(const void* a)")
    assert tidy("int f(size_t a)") != tidy("int f(int a)")


# What the wheel's header includes and does not bring.
CUDA_HEADERS = {
    "cuda_runtime.h": "#include <stddef.h>\n#define CUDART_VERSION 12000\n"
    "typedef struct CUstream_st* cudaStream_t; typedef struct CUevent_st* cudaEvent_t;",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
}
FIELDS = ("size", "magic", "version", "blocking", "cgaClusterSize")


def layout(folder: pathlib.Path, header: str, magic: str, undefined: str, *includes: pathlib.Path) -> list[int]:
    """Compile and run a program that prints the layout of the structs that we pass to NCCL."""
    numbers = [
        "sizeof(ncclUniqueId)",
        f"{magic}",
        f"(unsigned){undefined}",
        *(f"offsetof(ncclConfig_t, {field})" for field in FIELDS),
        *(f"sizeof(((ncclConfig_t*)0)->{field})" for field in FIELDS),
        "sizeof(ncclConfig_t)",
    ]
    prints = "".join(f'  printf("%lu\\n", (unsigned long)({number}));\n' for number in numbers)
    source, program = folder / f"{header}.c", folder / f"{header}.out"
    source.write_text(f'#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\nint main(void) {{\n{prints}}}\n')
    found = [f"-I{include}" for include in includes]
    subprocess.run([COMPILER, *found, source, "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return [int(line) for line in printed.splitlines()]


@pytest.mark.skipif(COMPILER is None, reason="no C compiler on the PATH")
def test_structs_are_nccls(header_path, tmp_path):
    """What we pass is the beginning of what NCCL reads, field by field, and no longer; ids are as long."""
    for name, text in CUDA_HEADERS.items():
        (tmp_path / name).write_text(text + "\n")
    ours = layout(tmp_path, "api.h", "NCS_NCCL_API_MAGIC", "NCS_CONFIG_UNDEF_INT", CSRC / "nccl", CSRC)
    theirs = layout(tmp_path, "nccl.h", "NCCL_API_MAGIC", "NCCL_CONFIG_UNDEF_INT", header_path.parent, tmp_path)
    assert ours[:-1] == theirs[:-1]
    assert ours[-1] == 40 <= theirs[-1]  # as of 2.17; a longer one would be another version's

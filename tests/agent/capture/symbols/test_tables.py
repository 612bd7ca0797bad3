"""Arguments are placed as the calling conventions say, and the tables agree with NVIDIA's own files. No root."""

import ctypes
import re
from importlib.metadata import PackageNotFoundError, files

import pytest
from elftools.elf.elffile import ELFFile

from ingero.agent.capture.kernel.abi import Role, Selector
from ingero.agent.capture.symbols.abi import build_arguments, build_selector
from ingero.agent.capture.symbols.cuda_driver import CUDA_DRIVER
from ingero.agent.capture.symbols.cuda_graph import GRAPH_RUNTIME
from ingero.agent.capture.symbols.cuda_runtime import CUDA_RUNTIME
from ingero.agent.capture.symbols.libraries import FUNCTIONS, build_descriptors, get_cookies
from ingero.errors import BadDataError
from ingero.model.events import OP_NAMES

LAUNCH = "func:ptr grid:dim3 block:dim3 args:ptr smem:u64 stream:ptr"
INIT = "comm:ptr nranks:i32 id:id128 rank:i32"


def place(prototype, machine="x86_64"):
    return {name: a.place for name, a in build_arguments(prototype, machine).items()}


def test_x86_64_passes_integers_in_six_registers_then_on_the_stack():
    assert place("a:ptr b:i32 c:u64 d:ptr e:ptr f:ptr g:i32 h:ptr") == {
        "a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 9, "h": 10,
    }  # fmt: skip


def test_x86_64_splits_a_dim3_over_two_registers_and_its_stack_arguments_follow():
    # As compiled by gcc 12 and seen at cudaLaunchKernel: stream at [rsp + 16].
    assert place(LAUNCH) == {
        "func": 1, "grid": 2, "block": 4, "args": 6, "smem": 9, "stream": 10,
    }  # fmt: skip


def test_x86_64_passes_the_unique_id_in_memory_so_the_rank_is_the_third_register():
    arguments = build_arguments(INIT, "x86_64")
    assert {n: a.place for n, a in arguments.items()} == {
        "comm": 1, "nranks": 2, "id": 9, "rank": 3,
    }  # fmt: skip
    assert build_selector("&id", arguments) == 9 | Selector.ADDRESS


def test_x86_64_does_not_split_a_structure_between_registers_and_memory():
    assert place("a:ptr b:ptr c:ptr d:ptr e:ptr g:dim3 h:ptr") == {
        "a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "g": 9, "h": 6,
    }  # fmt: skip


def test_aarch64_passes_a_pointer_to_the_unique_id_in_a_register():
    arguments = build_arguments(INIT, "aarch64")
    assert {n: a.place for n, a in arguments.items()} == {
        "comm": 1, "nranks": 2, "id": 3, "rank": 4,
    }  # fmt: skip
    assert build_selector("&id", arguments) == 3


def test_aarch64_passes_eight_integers_in_registers():
    assert place(LAUNCH, "aarch64")["stream"] == 8


def test_selectors_say_width_half_and_field():
    arguments = build_arguments(LAUNCH, "x86_64")
    assert build_selector("grid", arguments) == 2 | Selector.W32
    assert build_selector("grid.y", arguments) == 2 | Selector.HIGH
    assert build_selector("grid.z", arguments) == 3 | Selector.W32
    config = build_arguments("config:ptr", "x86_64")
    assert build_selector("config@32", config) == 1 | Selector.DEREF | 8 << Selector.OFFSET_SHIFT
    assert build_selector("config@12:i32", config) & Selector.W32


def test_an_unknown_type_or_machine_is_refused():
    with pytest.raises(BadDataError, match="x:float"):
        build_arguments("x:float", "x86_64")
    with pytest.raises(BadDataError, match="riscv"):
        build_arguments("x:ptr", "riscv")


def test_no_symbol_is_described_twice_and_every_operation_has_a_name():
    names = [name for function in FUNCTIONS for name in function.names()]
    assert len(names) == len(set(names)) == len(get_cookies()) + len(get_cookies(is_cxx=True))
    for function in FUNCTIONS:
        assert function.op in OP_NAMES[function.source], function.name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_row_becomes_a_descriptor(machine):
    descriptors = build_descriptors(machine)
    assert len(descriptors) == len(FUNCTIONS)
    by_name = dict(zip((f.name for f in FUNCTIONS), descriptors, strict=True))
    assert by_name["cudaEventRecord"]["needs_return"] == 0
    assert by_name["ncclAllReduce"]["is_collective"] == 1
    assert by_name["cudaEventQuery"]["pending_rc"] == 600
    assert by_name["cudaStreamQuery"]["pending_rc"] == 600
    assert by_name["cudaStreamSynchronize"]["pending_rc"] == 0
    assert by_name["ncclAllReduce"]["pending_rc"] == 7
    assert by_name["ncclAllReduce"]["args"][Role.COMM] == 6
    assert all(by_name[f.name]["is_collective"] for f in FUNCTIONS if f.is_cxx)


@pytest.mark.parametrize(
    ("package", "library"),
    [("nvidia-cuda-runtime-cu12", "libcudart.so.12"), ("nvidia-cuda-runtime", "libcudart.so.13")],
)
def test_every_runtime_row_exists_in_nvidia_s_library(package, library):
    try:
        (path,) = [f for f in files(package) if f.name == library]
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    with path.locate().open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        exported = {s.name for s in table.iter_symbols() if s["st_shndx"] != "SHN_UNDEF"}
    wanted = {name for function in (*CUDA_RUNTIME, *GRAPH_RUNTIME) for name in function.names()}
    assert wanted - exported == set()


HEADERS = [
    ("nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/include/cuda.h"),
    ("nvidia-cuda-runtime", "nvidia/cu13/include/cuda.h"),
]


def read_header(package, name):
    try:
        (path,) = [f for f in files(package) if str(f) == name]
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    return path.locate().read_text()


@pytest.mark.parametrize(("package", "name"), HEADERS)
def test_every_driver_row_is_declared_with_as_many_parameters_in_nvidia_s_header(package, name):
    declared = {
        found: parameters.count(",") + 1 if parameters.strip() != "void" else 0
        for found, parameters in re.findall(
            r"CUDAAPI\s+(cu\w+)\(([^;]*)\);", read_header(package, name)
        )
    }
    for function in CUDA_DRIVER:
        plain = function.name.removesuffix("_v2")
        assert plain in declared, function.name
        # What is not read at the end of a long prototype is left out of the table.
        if function.name != "cuCtxSynchronize_v2":  # declared without its parameter
            assert len(function.prototype.split()) <= declared[plain], function.name


@pytest.mark.parametrize(("package", "name"), HEADERS)
@pytest.mark.parametrize(
    ("function", "structure", "fields"),
    [
        ("cuMemcpy2D_v2", "CUDA_MEMCPY2D", ("WidthInBytes", "Height")),
        ("cuMemcpy2DAsync_v2", "CUDA_MEMCPY2D", ("WidthInBytes", "Height")),
        ("cuMemcpy3D_v2", "CUDA_MEMCPY3D", ("WidthInBytes", "Height", "Depth")),
        ("cuMemcpy3DPeerAsync", "CUDA_MEMCPY3D_PEER", ("WidthInBytes", "Height", "Depth")),
    ],
)
def test_sizes_of_driver_copies_lie_where_nvidia_s_header_has_them(
    package, name, function, structure, fields
):
    text = re.search(
        rf"typedef struct {structure}_st {{(.*?)}}", read_header(package, name), re.DOTALL
    )[1]
    members = re.findall(r"^\s*(?:const )?(\w+) (\**)(\w+);", text, re.MULTILINE)
    types = {"CUmemorytype": ctypes.c_int, "size_t": ctypes.c_size_t}
    layout = type(
        "Layout",
        (ctypes.Structure,),
        {
            "_fields_": [
                (member, ctypes.c_void_p if stars else types.get(kind, ctypes.c_uint64))
                for kind, stars, member in members
            ]
        },
    )
    (row,) = [one for one in CUDA_DRIVER if one.name == function]
    assert row.roles["size"] == "*".join(f"p@{getattr(layout, field).offset}" for field in fields)

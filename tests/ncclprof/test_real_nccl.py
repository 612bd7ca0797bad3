"""NVIDIA's own libnccl loads the plug-in and drives it through its own translation of the interface.

No GPU is there, so no communicator can be made: the functions of libnccl that load a plug-in, and those that turn its newest
event into an older version's, are called by their place in its symbol table. The wheel (nvidia-nccl-cu12, 335 MiB) is no dependency:
unpack it anywhere and name that folder in PYTHONPATH. Seen to pass with 2.32.3.
"""

import ctypes
import json
import os
import subprocess
import sys
from ctypes import c_void_p
from pathlib import Path

import pytest
from tests.ncclprof.nccl import InterfaceV5, Plugin

from ingero.agent.collectives.plugin import INTERFACES, find_plugin

LIBRARY = next(
    (
        path
        for folder in sys.path
        if (path := Path(folder, "nvidia/nccl/lib/libnccl.so.2")).exists()
    ),
    None,
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LIBRARY is None, reason="nvidia-nccl-cu12 is not in PYTHONPATH"),
]


@pytest.fixture(scope="module")
def functions():
    """Addresses of libnccl's functions by their mangled names, local ones too."""
    from elftools.elf.elffile import ELFFile

    wanted = {f"_Z18getNcclProfiler_v{version}Pv" for version in range(1, 8)}
    wanted |= {"_Z22ncclProfilerPluginInitP8ncclComm", "ncclGetVersion"}
    with LIBRARY.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".symtab").iter_symbols()
        offsets = {symbol.name: symbol["st_value"] for symbol in symbols if symbol.name in wanted}
    library = ctypes.CDLL(str(LIBRARY))
    known = ctypes.cast(library.ncclGetVersion, c_void_p).value
    return {name: known - offsets["ncclGetVersion"] + at for name, at in offsets.items()}


@pytest.mark.parametrize("version", INTERFACES)
def test_it_takes_the_plug_in_and_what_it_translates_arrives(functions, join, open_ring, version):
    plugin = ctypes.CDLL(str(find_plugin()))
    get = ctypes.CFUNCTYPE(c_void_p, c_void_p)(functions[f"_Z18getNcclProfiler_v{version}Pv"])
    address = get(plugin._handle)
    assert address, "NCCL found no symbol of that version"
    # What it gives is its newest interface, whose event begins as that of version 5 does.
    newest = Plugin(5, InterfaceV5.from_address(address))
    assert newest.interface.name == b"Ingero"
    comm = join(newest, comm=0xFEED_0000_0000_0002, rank=6, n_ranks=8)
    comm.play(7_000, 9_000, n_channels=3, func=b"AllGather", count=11, datatype=b"ncclFloat64")
    ring = open_ring()
    assert ring.api == version
    (row,) = ring.read()
    assert (row["comm"], row["rank"], row["n_ranks"]) == (0xFEED_0000_0000_0002, 6, 8)
    assert (row["gpu_start_ns"], row["gpu_stop_ns"], row["n_channels"]) == (7_000, 9_000, 3)
    assert (row["n_bytes"], row["op"]) == (88, 2)


LOADER = """
import ctypes, json, os, sys
from pathlib import Path
from ingero.agent.collectives.plugin_ring import find_rings_of
init = ctypes.CDLL(sys.argv[1])
base = ctypes.cast(init.ncclGetVersion, ctypes.c_void_p).value - int(sys.argv[2])
comm = ctypes.create_string_buffer(64 << 20)  # a communicator that is zero throughout
rc = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(base + int(sys.argv[3]))(ctypes.addressof(comm))
rings = find_rings_of(os.getpid(), Path(os.environ["INGERO_NCCL_DIR"]))
print(json.dumps([rc, [(ring.api, len(ring.read_places())) for ring in rings.values()]]))
"""


@pytest.mark.parametrize("named", ["by its path", "not"])
def test_it_loads_the_plug_in_where_the_variable_names_it_and_nowhere_else(functions, rings, named):
    base = functions["ncclGetVersion"]
    base -= base % 4096
    environment = dict(os.environ)
    environment.pop("NCCL_PROFILER_PLUGIN", None)
    if named == "by its path":
        environment["NCCL_PROFILER_PLUGIN"] = str(find_plugin())
    known = functions["ncclGetVersion"] - base
    init = functions["_Z22ncclProfilerPluginInitP8ncclComm"] - base
    told = subprocess.run(
        [sys.executable, "-c", LOADER, str(LIBRARY), str(known), str(init)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # Of the versions that it knows it takes the newest that the plug-in has.
    assert json.loads(told) == [0, [[6, 1]] if named == "by its path" else []]

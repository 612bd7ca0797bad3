"""Each release of NVIDIA's CUDA runtime, and NVIDIA's driver, under the probes: every function is seen with what it returned.

There is no device, so each call fails; with which code is the library's own. `make test-libraries` fetches them.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from scripts.libraries import CUDA, find_driver, find_fetched

from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.symbols.libraries import LIBRARIES

pytestmark = pytest.mark.kernel

QUICK = ("11.8.89", "12.1.105", "13.0.96")  # 12.9.79 and 13.5.37 are in test_nvidia_libraries.py
CHOSEN = tuple(CUDA) if "INGERO_LIBRARIES" in os.environ else QUICK

CALLS = """
import ctypes, json, os, sys
lib = ctypes.CDLL(sys.argv[1])
scratch = ctypes.create_string_buffer(1 << 16)
anything = ctypes.c_void_p(ctypes.addressof(scratch))
rcs = [getattr(lib, name)(*[anything] * 10) for name in json.loads(sys.argv[2])]
print(json.dumps({"pid": os.getpid(), "rcs": rcs}))
"""


def get_runtime(release):
    package, library = CUDA[release]
    path = find_fetched(package, release, library)
    if path is None:
        pytest.skip(f"CUDA {release} was not fetched: python -m scripts.libraries --cuda {release}")
    return path


def get_driver(library):
    path = find_driver(library)
    if path is None:
        pytest.skip("the driver was not fetched: python -m scripts.libraries --cuda driver")
    return path


def find_functions(path, name):
    """Functions of our table that a library exports, each with its row, in the table's order."""
    with path.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        exported = {symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"}
    (library,) = [library for library in LIBRARIES if library.name == name]
    return [(n, row) for row in library.functions for n in row.names() if n in exported]


def check_calls(engine, read, target, path, name):
    """Call every function once; each has one record with its operation and what the caller got."""
    functions = find_functions(path, name)
    engine.control.watch_uid(os.getuid())
    assert target.libraries == (name,)
    assert engine.attach(target)
    names = json.dumps([function for function, _ in functions])
    done = subprocess.run(
        [sys.executable, "-c", CALLS, str(path), names], capture_output=True, text=True, check=True
    )
    account = json.loads(done.stdout.splitlines()[-1])
    traced = read(engine, [account])
    records = np.concatenate([
        traced.records[ring] for ring in ("calls", "kept_calls", "failed_calls")
    ])
    records = records[(records["pid"] == account["pid"]) & (records["depth"] == 0)]
    records = records[np.argsort(records["header"]["mono_ns"], kind="stable")]
    assert [(int(r["source"]), int(r["op"]), int(r["rc"])) for r in records] == [
        (row.source, row.op, rc if row.needs_return else 0)
        for (_, row), rc in zip(functions, account["rcs"], strict=True)
    ]
    assert not traced.losses["unmatched"]
    return {function for function, _ in functions}


@pytest.mark.parametrize("release", CHOSEN)
def test_every_function_of_a_runtime_is_seen_with_what_it_returned(
    start_engine, read, target_of, release
):
    path = get_runtime(release)
    engine = start_engine(EngineSettings(host_probes=(), keep_first=1 << 20), attach=False)
    names = check_calls(engine, read, target_of(path), path, "cudart")
    assert {"cudaLaunchKernel_ptsz", "cudaMemcpy_ptds", "cudaLaunchKernelExC"} <= names
    assert ("__cudaLaunchKernel" in names) == (int(release.split(".")[0]) >= 12)


def test_every_function_of_the_driver_is_seen_with_what_it_returned(start_engine, read, target_of):
    path = get_driver("libcuda.so.1")
    engine = start_engine(EngineSettings(host_probes=(), keep_first=1 << 20), attach=False)
    names = check_calls(engine, read, target_of(path), path, "cuda")
    assert {"cuLaunchKernelEx_ptsz", "cuMemAlloc_v2", "cuMemcpyDtoHAsync_v2_ptsz"} <= names


def test_nvidia_s_nvml_without_a_driver_says_so():
    path = get_driver("libnvidia-ml.so.1")
    script = """
from ingero.agent.capture.gpu.nvml import Nvml
from ingero.errors import UnsupportedError
from ingero.telemetry.clock import SystemClock
try:
    Nvml(SystemClock())
except UnsupportedError as error:
    print(error.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=dict(os.environ) | {"LD_LIBRARY_PATH": str(path.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Driver Not Loaded" in done.stdout, done.stdout

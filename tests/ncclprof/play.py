"""Two ranks of one process make a communicator with a real libnccl and call collectives, on a machine without a device.

All of NCCL's host code runs: bootstrap, topology, transports over shared memory, enqueueing, the proxy's threads, and the loader of its
profiler plug-in. The CUDA runtime that is linked into libnccl is taken out: each of its functions begins with a jump into
no_device.c. Written to its output: one line of JSON.

Arguments: libnccl, the built no_device.c (as libnvidia-ml.so.1, in a folder of LD_LIBRARY_PATH), collectives a rank is to see timed.
"""

import ctypes
import json
import os
import struct
import sys
import threading
import time
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path

from elftools.elf.elffile import ELFFile

from ingero.agent.collectives.plugin_ring import find_rings_of

N_RANKS = 2
FLOAT32, FLOAT64, SUM = 7, 8, 0
COUNTS = {
    "AllReduce": (1000, 2000, 3000),
    "AllGather": (100,),
    "ReduceScatter": (200,),
    "Broadcast": (300,),
}
N_CALLS = sum(map(len, COUNTS.values()))
MAKERS = {
    *(
        "cudaStreamCreate",
        "cudaStreamCreateWithFlags",
        "cudaStreamCreateWithPriority",
        "cudaEventCreate",
    ),
    *(
        "cudaEventCreateWithFlags",
        "cudaDeviceGetDefaultMemPool",
        "cudaMemPoolCreate",
        "cudaUserObjectCreate",
    ),
}
PROT_ALL, PATIENCE_S = 7, 30


class Id(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


def take_out_runtime(nccl, path, stand_in):
    """Make every function of the CUDA runtime in libnccl one of no_device.c; what that does not have does nothing and succeeds."""
    with path.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".symtab").iter_symbols()
        at = {
            s.name: s["st_value"]
            for s in symbols
            if s["st_info"]["type"] == "STT_FUNC" and s["st_value"]
        }
    base = ctypes.cast(nccl.ncclGetVersion, c_void_p).value - at["ncclGetVersion"]
    libc = ctypes.CDLL(None)
    for name, offset in at.items():
        if not name.startswith("cuda") or not name[4:5].isupper():
            continue
        plain = name.removesuffix("_ptsz").removesuffix("_ptds")
        other = "run_new" if plain in MAKERS else "run_ok"
        function = getattr(stand_in, f"run_{plain.removeprefix('cuda')}", None) or getattr(
            stand_in, other
        )
        page = (base + offset) & ~4095
        assert libc.mprotect(c_void_p(page), c_size_t(8192), PROT_ALL) == 0
        # movabs rax, function; jmp rax
        jump = b"\x48\xb8" + struct.pack("<Q", ctypes.cast(function, c_void_p).value) + b"\xff\xe0"
        ctypes.memmove(base + offset, jump, len(jump))


def play(nccl, stand_in, rank, identity, told, wait):
    """One rank's life; what each function returned goes to `told`."""
    stand_in.run_SetDevice(rank)
    comm, word = c_void_p(), c_int()
    sent, received = (ctypes.create_string_buffer(1 << 16) for _ in range(2))
    told.append(nccl.ncclCommInitRank(ctypes.byref(comm), N_RANKS, identity, rank))
    if told[0]:
        return
    stream = c_void_p(0x77)
    for name, counts in COUNTS.items():
        extra = {"Broadcast": (1,), "AllGather": ()}.get(name, (SUM,))
        kind = FLOAT32 if name == "AllReduce" else FLOAT64
        for count in counts:
            function = getattr(nccl, f"nccl{name}")
            told.append(function(sent, received, c_size_t(count), kind, *extra, comm, stream))
    told.append(nccl.ncclCommUserRank(comm, ctypes.byref(word)) or word.value != rank)
    wait()
    told.append(nccl.ncclCommDestroy(comm))


def read_timed(n_timed, rings):
    """The collectives that were timed, once every rank has so many."""
    rows, deadline_s = [], time.monotonic() + PATIENCE_S
    while rings and len(rows) < n_timed * N_RANKS and time.monotonic() < deadline_s:
        for ring in rings.values():
            rows.extend(ring.read())
    return rows


def main():
    path, n_timed = Path(sys.argv[1]), int(sys.argv[3])
    stand_in, nccl = ctypes.CDLL(sys.argv[2]), ctypes.CDLL(str(path))
    take_out_runtime(nccl, path, stand_in)
    version, identity = c_int(), Id()
    assert nccl.ncclGetVersion(ctypes.byref(version)) == 0
    assert nccl.ncclGetUniqueId(ctypes.byref(identity)) == 0
    told = [[] for _ in range(N_RANKS)]
    called, read = (threading.Barrier(N_RANKS + 1, timeout=4 * PATIENCE_S) for _ in range(2))
    threads = [
        threading.Thread(
            target=play,
            args=(nccl, stand_in, rank, identity, told[rank], lambda: (called.wait(), read.wait())),
            daemon=True,
        )
        for rank in range(N_RANKS)
    ]
    for thread in threads:
        thread.start()
    called.wait()
    rings = find_rings_of(os.getpid(), Path(os.environ["INGERO_NCCL_DIR"]))
    rows = read_timed(n_timed, rings)
    places = [place for ring in rings.values() for place in ring.read_communicators()]
    account = {
        "pid": os.getpid(),
        "version": version.value,
        "words": list(identity.words),
        "apis": [int(ring.api) for ring in rings.values()],
        "places": [
            [int(place[n]) for n in ("comm", "rank", "n_ranks", "entered", "left")]
            for place in places
        ],
        "rows": [{name: int(row[name]) for name in row.dtype.names} for row in rows],
    }
    read.wait()
    for thread in threads:
        thread.join(PATIENCE_S)
    print(json.dumps(account | {"told": told}), flush=True)
    os._exit(0)  # NCCL's own threads may outlive their communicators


if __name__ == "__main__":
    main()

"""Packed collective columns against zlib-compressed rows of the same operations."""

import timeit
import zlib
from functools import partial

import numpy as np

from ingero.model.collectives import COLLECTIVE_OP, CollectiveOp
from ingero.wire.collectives import pack_ops, unpack_ops

SAYS = "packing and unpacking a record of collective operations; the floor is zlib level 1 on the same rows"
SIZES = (64, 1_000, 10_000)


def build_ops(n_ops):
    rng = np.random.default_rng(1)
    ops = np.zeros(n_ops, COLLECTIVE_OP)
    ops["seq"] = np.arange(1_000, 1_000 + n_ops)
    ops["inside_ns"] = rng.integers(10**5, 10**7, n_ops)
    ops["own_ns"] = rng.integers(10**6, 10**8, n_ops)
    ops["entry_ns"] = 1_795_230_273_280_661_023 + np.cumsum(ops["inside_ns"] + ops["own_ns"])
    is_reduce = np.arange(n_ops) % 3 == 0
    ops["n_bytes"] = np.where(is_reduce, 1 << 26, 1 << 20)
    ops["op"] = np.where(is_reduce, CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER)
    return ops


def measure_us(action, *arguments):
    timer = timeit.Timer(partial(action, *arguments))
    n_runs, _ = timer.autorange()
    return min(timer.repeat(3, n_runs)) / n_runs * 1e6


def unzip_rows(squeezed):
    return np.frombuffer(zlib.decompress(squeezed), COLLECTIVE_OP)


def run():
    yield "   operations   bytes/op packed (zlib)   pack µs (zlib)   unpack µs (zlib)   unpack ratio"
    for n_ops in SIZES:
        ops = build_ops(n_ops)
        packed, rows = pack_ops(ops), ops.tobytes()
        squeezed = zlib.compress(rows, 1)
        assert unpack_ops(packed).tobytes() == rows
        pack_us, zip_us = measure_us(pack_ops, ops), measure_us(zlib.compress, rows, 1)
        unpack_us, unzip_us = measure_us(unpack_ops, packed), measure_us(unzip_rows, squeezed)
        yield (
            f"   {n_ops:>10}   {len(packed) / n_ops:8.1f} ({len(squeezed) / n_ops:.1f})"
            f"{pack_us:18.0f} ({zip_us:.0f}){unpack_us:14.0f} ({unzip_us:.0f})"
            f"{unzip_us / unpack_us:16.1f}×"
        )

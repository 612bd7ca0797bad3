"""CUDA graphs, by the runtime's and the driver's functions.

Source: prototypes of ``cuda_runtime_api.h`` and ``cuda.h`` in CUDA 12.9 and 13.0. PyTorch instantiates with
``cudaGraphInstantiateWithFlags``.
"""

from __future__ import annotations

import functools
from typing import Final

from ingero.agent.capture.kernel.abi import Act
from ingero.agent.capture.symbols.table import Function, row
from ingero.model.events import GraphOp, Source

_PTSZ: Final = ("_ptsz",)
_graph = functools.partial(row, Source.CUDA_GRAPH)
_begin = functools.partial(
    _graph, GraphOp.BEGIN_CAPTURE, suffixes=_PTSZ, stream="stream", aux="mode"
)
_instantiate = functools.partial(_graph, GraphOp.INSTANTIATE, act=Act.OUT, out="exec", aux="graph")
_TO_GRAPH: Final = "stream:ptr graph:ptr deps:ptr data:ptr n:u64 mode:i32"


def _both(prefix: str, suffix: str = "") -> tuple[Function, ...]:
    """The calls that the runtime and the driver have under names that differ by prefix only."""
    return (
        _graph(
            GraphOp.END_CAPTURE,
            f"{prefix}StreamEndCapture",
            "stream:ptr graph:ptr",
            act=Act.OUT,
            suffixes=_PTSZ,
            stream="stream",
            out="graph",
        ),
        _instantiate(f"{prefix}GraphInstantiateWithFlags", "exec:ptr graph:ptr flags:u64"),
        _instantiate(
            f"{prefix}GraphInstantiateWithParams", "exec:ptr graph:ptr params:ptr", suffixes=_PTSZ
        ),
        _begin(f"{prefix}StreamBeginCaptureToGraph", _TO_GRAPH),
        _graph(
            GraphOp.LAUNCH,
            f"{prefix}GraphLaunch",
            "exec:ptr stream:ptr",
            suffixes=_PTSZ,
            handle="exec",
            stream="stream",
        ),
        _graph(GraphOp.DESTROY, f"{prefix}GraphDestroy", "graph:ptr", handle="graph"),
        _graph(
            GraphOp.EXEC_UPDATE,
            f"{prefix}GraphExecUpdate{suffix}",
            "exec:ptr graph:ptr info:ptr",
            handle="exec",
            aux="graph",
        ),
        _graph(GraphOp.EXEC_DESTROY, f"{prefix}GraphExecDestroy", "exec:ptr", handle="exec"),
    )


GRAPH_RUNTIME: Final[tuple[Function, ...]] = (
    _begin("cudaStreamBeginCapture", "stream:ptr mode:i32"),
    _instantiate("cudaGraphInstantiate", "exec:ptr graph:ptr flags:u64"),
    *_both("cuda"),
)

GRAPH_DRIVER: Final[tuple[Function, ...]] = (
    _begin("cuStreamBeginCapture_v2", "stream:ptr mode:i32"),
    *_both("cu", "_v2"),
)

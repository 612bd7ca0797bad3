"""Which tables go with which library, and how a library is recognised."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.agent.capture.kernel.abi import MAX_DESCRIPTORS
from ingero.agent.capture.symbols.cuda_driver import CUDA_DRIVER
from ingero.agent.capture.symbols.cuda_graph import GRAPH_DRIVER, GRAPH_RUNTIME
from ingero.agent.capture.symbols.cuda_runtime import CUDA_RUNTIME
from ingero.agent.capture.symbols.gloo import GLOO
from ingero.agent.capture.symbols.nccl import NCCL
from ingero.agent.capture.symbols.table import Function, build_descriptor
from ingero.model.arrays import Records


@dataclass(frozen=True, slots=True)
class Library:
    """A library that we probe.

    Attributes:
        name: How we call it.
        functions: Its rows.
    """

    name: str
    functions: tuple[Function, ...]


LIBRARIES: Final = (
    Library("cudart", (*CUDA_RUNTIME, *GRAPH_RUNTIME)),
    Library("cuda", (*CUDA_DRIVER, *GRAPH_DRIVER)),
    Library("nccl", NCCL),
    Library("gloo", GLOO),
)
"""In this order their rows number the descriptors."""

FUNCTIONS: Final = tuple(function for library in LIBRARIES for function in library.functions)


@functools.cache
def get_cookies(*, is_cxx: bool = False) -> dict[str, int]:
    """The descriptor's index for every symbol name: of functions of C, or of those of C++."""
    return {
        name: index
        for index, function in enumerate(FUNCTIONS)
        for name in function.names()
        if function.is_cxx == is_cxx
    }


def build_descriptors(machine: str = "") -> Records:
    """The descriptor table for this (or the named) machine, in the order of `get_cookies`."""
    if len(FUNCTIONS) > MAX_DESCRIPTORS:
        raise AssertionError("the descriptor map is too small for the tables")
    return np.concatenate([build_descriptor(f, machine or platform.machine()) for f in FUNCTIONS])

"""No program that a uprobe runs has its stack in a place of its CPU, where the next thread that is probed would write over it.

Linux gives tracing programs such a stack from 6.13 on (x86-64; arm64 from 6.17) unless they have a tail call, and the threads that
uprobes run in may be preempted (open-telemetry/opentelemetry-ebpf-instrumentation#3056: the kernel dies).
"""

import ctypes
import platform
import re

import pytest
from elftools.elf.elffile import ELFFile

from ingero.agent.capture.kernel.objects import OBJECTS
from ingero.agent.capture.kernel.syscalls import bpf
from ingero.agent.capture.probes.modes import load_calls, load_cxx
from ingero.config.environment import ProbeMode

GET_INFO_BY_FD = 15  # bpf_cmd of include/uapi/linux/bpf.h, as is all below
TAIL_CALL = bytes((0x85, 0, 0, 0)) + (12).to_bytes(4, "little")
# movabs r9, ADDRESS; add r9, gs:[...]: in arch/x86/net/bpf_jit_comp.c, emit_priv_frame_ptr().
PRIVATE_STACK = re.compile(rb"\x49\xb9.{8}\x65\x4c\x03", re.DOTALL)


class ProgramInfo(ctypes.Structure):
    _fields_ = (
        ("type_and_id", ctypes.c_uint32 * 2),
        ("tag", ctypes.c_uint8 * 8),
        ("jited_prog_len", ctypes.c_uint32),
        ("xlated_prog_len", ctypes.c_uint32),
        ("jited_prog_insns", ctypes.c_uint64),
        ("rest", ctypes.c_uint8 * 200),
    )


class InfoByFd(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_uint32),
        ("info_len", ctypes.c_uint32),
        ("info", ctypes.c_uint64),
    )


def read_machine_code(fd):
    """What the kernel made of a program."""
    code = ctypes.create_string_buffer(1 << 20)
    info = ProgramInfo(jited_prog_len=len(code), jited_prog_insns=ctypes.addressof(code))
    bpf(GET_INFO_BY_FD, InfoByFd(fd, ctypes.sizeof(info), ctypes.addressof(info)))
    return code.raw[: info.jited_prog_len]


@pytest.mark.parametrize(
    "path", sorted(OBJECTS.glob("*/calls*.bpf.o")), ids=lambda path: f"{path.parent.name}-{path.name}"
)  # fmt: skip
def test_every_program_of_a_uprobe_has_a_tail_call_that_is_never_made(path):
    with path.open("rb") as file:
        elf = ELFFile(file)
        functions = [
            symbol
            for symbol in elf.get_section_by_name(".symtab").iter_symbols()
            if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_info"]["bind"] == "STB_GLOBAL"
        ]
        programs = {
            symbol.name: section.data()[symbol["st_value"] : symbol["st_value"] + symbol["st_size"]]
            for symbol in functions
            if (section := elf.get_section(symbol["st_shndx"])).name
            != ".text"  # what programs call
        }
    assert programs
    assert [name for name, code in programs.items() if TAIL_CALL not in code] == []


@pytest.mark.kernel
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the pattern is x86-64's")
@pytest.mark.parametrize("mode", [ProbeMode.SESSION, ProbeMode.PAIR])
def test_the_kernel_keeps_no_stack_for_a_cpu(mode):
    _, calls, _ = load_calls(mode, {})
    with calls, load_cxx(mode, calls.maps) as cxx:
        programs = calls.programs | cxx.programs
        codes = {name: read_machine_code(fd) for name, fd in programs.items()}
    assert len(codes) >= 3
    assert all(len(code) > 1000 for code in codes.values())
    assert [name for name, code in codes.items() if PRIVATE_STACK.search(code)] == []

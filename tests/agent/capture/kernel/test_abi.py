"""The Python side of the record ABI is what the compiled objects say. No root."""

import enum
import re
from pathlib import Path

import numpy as np
import pytest

from ingero.agent.capture.kernel import abi
from ingero.agent.capture.kernel.btf import Btf, read_btf
from ingero.agent.capture.kernel.objects import OBJECTS, find_object
from ingero.errors import BadDataError, UnsupportedError
from ingero.model import latency
from ingero.model.events import HostOp, IoOp, NetOp, OffCpuReason, Source, TcpOp, op_name
from ingero.model.sampling import LARGE_BYTES, LONG_REQUEST_NS

ENUMS = {
    "ig_flag": ("IG_FLAG_", abi.Flag),
    "ig_stacks": ("IG_STACKS_", abi.Stacks),
    "ig_act": ("IG_ACT_", abi.Act),
    "ig_process_event": ("IG_PROCESS_", abi.ProcessEvent),
    "ig_stack_flag": ("IG_STACK_", abi.StackFlag),
    "ig_unwind_kind": ("IG_UNWIND_", abi.UnwindKind),
    "ig_python_frame_flag": ("IG_FRAME_", abi.PythonFrameFlag),
}
ROOT = Path(__file__).resolve().parents[4]
MACHINES = sorted(path.name for path in OBJECTS.iterdir())


@pytest.mark.parametrize("name", ENUMS)
def test_an_enumeration_has_the_header_s_names_and_values(name):
    prefix, ours = ENUMS[name]
    theirs = {n.removeprefix(prefix): v for n, v in abi.get_btf().build_enum(name).items()}
    assert theirs == {member.name: member.value for member in ours}


def test_roles_and_limits_have_the_header_s_values():
    roles = abi.get_btf().build_enum("ig_role")
    assert roles.pop("IG_N_ROLES") == abi.N_ROLES
    assert {n.removeprefix("IG_ARG_"): v for n, v in roles.items()} == {
        role.name: role.value for role in abi.Role
    }
    limits = abi.get_btf().build_enum("ig_limit")
    assert limits["IG_MAX_DESCRIPTORS"] == abi.MAX_DESCRIPTORS
    assert limits["IG_MAX_NATIVE"] == abi.MAX_NATIVE
    assert limits["IG_MAX_PYTHON"] == abi.MAX_PYTHON
    assert limits["IG_N_COPY_KINDS"] == abi.N_COPY_KINDS
    assert limits["IG_N_REGS"] == abi.N_REGISTERS
    assert limits["IG_HIST_BUCKETS"] == latency.HIST_BUCKETS
    assert limits["IG_HIST_FIRST_LOG2"] == latency.HIST_FIRST_LOG2
    assert limits["IG_LARGE_BYTES"] == LARGE_BYTES
    assert limits["IG_LONG_REQUEST_NS"] == LONG_REQUEST_NS
    selectors = abi.get_btf().build_enum("ig_selector")
    assert selectors == {
        f"IG_SEL_{'32' if bit is abi.Selector.W32 else bit.name}": bit.value for bit in abi.Selector
    }


@pytest.mark.parametrize(
    ("name", "prefix", "ours"),
    [("ig_source", "IG_SOURCE_", Source), ("ig_off_cpu_reason", "IG_OFF_", OffCpuReason)],
)
def test_recorded_numbers_agree_with_the_model(name, prefix, ours: type[enum.IntEnum]):
    theirs = abi.get_btf().build_enum(name)
    theirs.pop("IG_N_SOURCES", None)
    aliases = {"IO": "BLOCKED_IO"} if ours is OffCpuReason else {}
    for text, value in theirs.items():
        member = text.removeprefix(prefix)
        assert ours[aliases.get(member, member)].value == value


OPS = {"host": HostOp, "io": IoOp, "tcp": TcpOp, "net": NetOp}


@pytest.mark.parametrize("source", OPS)
def test_every_operation_that_a_host_probe_can_tell_has_its_number_and_a_name(source):
    told = abi.get_btf().build_enum(f"ig_{source}_op")
    assert told
    for text, value in told.items():
        assert OPS[source][text.removeprefix(f"IG_{source.upper()}_")] == value
    if source == "host":
        told |= abi.get_btf().build_enum("ig_process_event")
    assert not [value for value in told.values() if "(" in op_name(Source[source.upper()], value)]


@pytest.mark.parametrize("path", sorted(ROOT.glob("bpf/*.bpf.c")), ids=lambda path: path.name)
def test_a_probe_s_operations_are_in_the_header_alone(path):
    assert re.findall(r"\bOP_[A-Z_]+ = \d+", path.read_text()) == []


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_s_object_has_the_same_layouts(machine):
    btf = read_btf(find_object("calls", machine))
    for name in (
        "call",
        "collective",
        "off_cpu",
        "process",
        "block",
        "tcp",
        "span",
        "count",
        "settings",
        "thread",
        "unfinished",
    ):
        assert btf.build_dtype(f"ig_{name}") == abi.get_dtype(name)


def test_a_record_s_fields_are_where_the_c_compiler_put_them():
    call = abi.get_dtype("call")
    assert call.itemsize == 128
    assert call.fields["duration_ns"] == (np.dtype("<u8"), 16)
    assert call.fields["rc"] == (np.dtype("<i4"), 72)
    assert call.fields["comm"] == (np.dtype("S16"), 104)
    assert call["header"].fields["mono_ns"] == (np.dtype("<u8"), 8)
    assert abi.get_dtype("count").fields["hist"][0].shape == (latency.HIST_BUCKETS,)
    assert abi.get_dtype("thread").fields["frames"][0].shape == (8,)


def test_a_missing_structure_or_object_is_named():
    with pytest.raises(BadDataError, match="ig_nonsense"):
        abi.get_dtype("nonsense")
    with pytest.raises(BadDataError, match="BTF"):
        Btf(b"\0" * 24)
    with pytest.raises(UnsupportedError, match="riscv"):
        find_object("calls", "riscv")


def test_bucket_edges_double_every_four_steps():
    edges = latency.build_bucket_edges_ns()
    assert edges[:7].tolist() == [0, 128, 160, 192, 224, 256, 320]
    assert len(edges) == latency.HIST_BUCKETS + 1
    assert np.allclose(edges[5:] / edges[1:-4], 2)

"""A C++ call that ends by an exception which its own probed caller catches. No function of PyTorch 2.13 does that; longjmp leaves a call alike."""

import ctypes
import subprocess
from pathlib import Path

import pytest
from tests.support.compiler import CC

from ingero.agent.capture.discover.processes import open_file
from ingero.agent.capture.kernel.syscalls import bpf
from ingero.agent.capture.probes import modes
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.probes.torch import find_torch_target
from ingero.agent.capture.symbols.gloo import GLOO
from ingero.config.environment import ProbeMode
from ingero.errors import UnsupportedError
from ingero.model.events import GlooOp, Source

pytestmark = pytest.mark.kernel
LEFT, CATCHER = (
    "_ZN4gloo9broadcastERNS_16BroadcastOptionsE",
    "_ZN4gloo9allreduceERKNS_16AllreduceOptionsE",
)
LIBRARY = f"""
#include <setjmp.h>
static jmp_buf caught;
void left(void *options) __asm__("{LEFT}");
int catcher(void *options) __asm__("{CATCHER}");
__attribute__((noinline)) void left(void *options) {{ longjmp(caught, 1); }}
int catcher(void *options)
{{
	if (!setjmp(caught))
		left(options);
	return 1;
}}
"""
PROGRAM = f"""
int catcher(void *options) __asm__("{CATCHER}");
static char options[256];
int main(void) {{ return catcher(options) + catcher(options) - 2; }}
"""

GET_INFO_BY_FD = 15  # bpf_cmd of include/uapi/linux/bpf.h, as is all below


class ProgramInfo(ctypes.Structure):
    _fields_ = (("before", ctypes.c_uint8 * 64), ("name", ctypes.c_char * 16))


class InfoByFd(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_uint32),
        ("info_len", ctypes.c_uint32),
        ("info", ctypes.c_uint64),
    )


@pytest.fixture(scope="module")
def torch(tmp_path_factory):
    """A folder like PyTorch's, with a library that has each name of Gloo's, and a program that calls it."""
    folder = tmp_path_factory.mktemp("torch")
    (folder / "lib").mkdir()
    (folder / "version.py").write_text("__version__ = '2.13.0'\n")
    others = "".join(
        f'void other{at}(void) __asm__("{row.name}"); void other{at}(void) {{}}\n'
        for at, row in enumerate(GLOO)
        if row.name not in {LEFT, CATCHER}
    )
    (folder / "library.c").write_text(LIBRARY + others)
    (folder / "program.c").write_text(PROGRAM)
    compiler = [*CC, "-O1"]
    library = folder / "lib/libtorch_cpu.so"
    subprocess.run([*compiler, "-shared", "-fPIC", folder / "library.c", "-o", library], check=True)
    subprocess.run(
        [*compiler, folder / "program.c", library, f"-Wl,-rpath,{folder}/lib", "-o", folder / "program"],
        check=True,
    )  # fmt: skip
    return folder


def count_programs(prefix):
    """Loaded programs of this process whose name begins so."""
    n_programs = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            is_program = str(fd.readlink()) == "anon_inode:bpf-prog"
        except FileNotFoundError:  # the one that listed them
            continue
        n_programs += is_program and read_program_name(int(fd.name)).startswith(prefix)
    return n_programs


def read_program_name(fd):
    info = ProgramInfo()
    bpf(GET_INFO_BY_FD, InfoByFd(fd, ctypes.sizeof(info), ctypes.addressof(info)))
    return info.name.decode()


@pytest.mark.parametrize("mode", [ProbeMode.SESSION, ProbeMode.PAIR, ProbeMode.EVENT])
def test_who_catches_an_exception_returns_as_ever_and_the_call_inside_has_failed(
    torch, start_engine, read, mode
):
    engine = start_engine(EngineSettings(host_probes=(), probe_mode=mode))
    assert count_programs("cxx_") == 0
    library = torch / "lib/libtorch_cpu.so"
    with open_file(library) as opened:
        assert engine.attach(find_torch_target(opened, str(library), Path("/")), opened.reach)
    subprocess.run([torch / "program"], check=True)
    assert count_programs("cxx_") == 2
    traced = read(engine, [])
    found = {
        int(key["op"]): (int(count["entered"]), int(count["seen"]), int(count["errors"]))
        for key, count in zip(traced.keys, traced.counts, strict=True)
        if key["source"] == Source.GLOO
    }
    assert found == {GlooOp.ALL_REDUCE: (2, 2, 0), GlooOp.BROADCAST: (2, 2, 2)}
    records = traced.records["collectives"]
    returned = records[records["op"] == GlooOp.ALL_REDUCE]
    assert returned["rc"].tolist() == [0, 0]
    assert (returned["duration_ns"] > 0).all()
    assert len(engine.state.read_in_flight()) == 0


def test_a_refusal_of_the_programs_of_cxx_is_not_remembered(torch, start_engine, monkeypatch):
    engine = start_engine(EngineSettings(host_probes=()))
    library = torch / "lib/libtorch_cpu.so"

    def refuse(*_):
        raise UnsupportedError("Cannot allocate memory")

    with open_file(library) as opened:
        target = find_torch_target(opened, str(library), Path("/"))
        with monkeypatch.context() as patch:
            patch.setattr(modes, "load_cxx", refuse)
            with pytest.raises(UnsupportedError, match="memory"):
                engine.attach(target, opened.reach)
        assert engine.attach(target, opened.reach)
    assert count_programs("cxx_") == 2

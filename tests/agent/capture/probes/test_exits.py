"""The last instructions of functions written as machine code, in a file that is laid out by hand."""

import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.compiler import CC

from ingero.agent.capture.discover.processes import open_file
from ingero.agent.capture.probes.exits import ExitFinder, _open_decoder
from ingero.agent.capture.probes.torch import find_torch_target, find_torch_version
from ingero.config.torch import find_torch_python
from ingero.errors import BadDataError, UnsupportedError

X86_64, AARCH64 = 62, 183
SHIFT = 0x1000  # from a place in the file to its address
LINKAGE = (0x9000, 0x9100)
RET, NOP = b"\xc3", b"\x90"


def jump(at, target, opcode=b"\xe9"):
    """``jmp`` or, with another opcode, a conditional jump."""
    return opcode + struct.pack("<i", target - at - len(opcode) - 4)


@dataclass
class File:
    """Code by its address; also the tables of the file."""

    parts: dict

    def read(self, offset, n_bytes):
        return self.parts[offset + SHIFT][:n_bytes]

    def find_address(self, offset):
        return offset + SHIFT

    def get_offset(self, address):
        return address - SHIFT

    def find_function(self, address):
        for begin, code in self.parts.items():
            if begin <= address < begin + len(code):
                return begin, begin + len(code)
        raise BadDataError("no function")


def find(parts, begin=0x2000, machine=X86_64):
    file = File(parts)
    finder = ExitFinder(file, file, file, (LINKAGE,), _open_decoder(machine))
    return {offset + SHIFT for offset in finder.find(begin - SHIFT)}


def test_every_return_is_an_end():
    assert find({0x2000: NOP + RET + NOP + RET}) == {0x2001, 0x2003}


def test_a_jump_inside_is_none_and_one_to_another_function_is_followed():
    inside = jump(0x2000, 0x2006)
    assert find({0x2000: inside + NOP + RET}) == {0x2006}
    assert find({0x2000: jump(0x2000, 0x3000), 0x3000: NOP + RET}) == {0x3001}


def test_a_part_elsewhere_is_followed_from_a_condition_and_back():
    there = jump(0x2000, 0x5001, b"\x0f\x84")
    assert find({0x2000: there + RET, 0x5000: NOP + jump(0x5001, 0x2006)}) == {0x2006}


def test_a_jump_to_another_library_or_by_a_register_is_an_end_itself():
    assert find({0x2000: jump(0x2000, LINKAGE[0])}) == {0x2000}
    assert find({0x2000: NOP + b"\xff\xe0"}) == {0x2001}


def test_what_is_no_code_or_has_no_end_is_refused():
    with pytest.raises(BadDataError, match="else than code"):
        find({0x2000: NOP + b"\x06" + RET})
    chain = {0x2000 + 16 * i: jump(0x2000 + 16 * i, 0x2010 + 16 * i) for i in range(40)}
    with pytest.raises(BadDataError, match="no end"):
        find(chain)
    with pytest.raises(UnsupportedError, match="processor 8"):
        _open_decoder(8)


def test_arm_s_returns_and_jumps_are_known():
    words = [0x14000002, 0xD65F03C0, 0x54000040, 0x1400_03FD, 0xD65F03C0, 0xD61F0200]
    # b +8; ret; b.eq +8; b 0x3000; ret; br x16
    code = struct.pack("<6I", *words)
    ends = find({0x2000: code, 0x3000: struct.pack("<I", 0xD65F03C0)}, machine=AARCH64)
    assert ends == {0x2004, 0x2010, 0x2014, 0x3000}


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("version.py", "debug = False\n__version__ = '2.13.0+cpu'\n", "2.13.0"),
        ("build-version", "2.12.1+cu130\n", "2.12.1"),
        ("other", "2.13.0", ""),
    ],
)
def test_a_library_s_release_stands_beside_its_folder(tmp_path, name, text, version):
    folder = tmp_path / "site/torch"
    (folder / "lib").mkdir(parents=True)
    (folder / name).write_text(text)
    assert find_torch_version("/site/torch/lib/libtorch_cpu.so", tmp_path) == version


@pytest.mark.timeout(20)
def test_a_pipe_beside_a_library_is_not_waited_for(tmp_path):
    (tmp_path / "site/torch").mkdir(parents=True)
    os.mkfifo(tmp_path / "site/torch/version.py")
    (tmp_path / "site/torch/build-version").write_text("2.12.1\n")
    assert find_torch_version("/site/torch/lib/libtorch_cpu.so", tmp_path) == "2.12.1"


def test_the_release_beside_a_library_that_was_replaced_is_not_taken_for_its_own(tmp_path):
    library, source = tmp_path / "site/torch/lib/libtorch_cpu.so", tmp_path / "gloo.c"
    library.parent.mkdir(parents=True)
    (tmp_path / "site/torch/version.py").write_text("__version__ = '2.13.0'\n")
    source.write_text(
        'void close_context(void) __asm__("_ZN4gloo7ContextD2Ev");\nvoid close_context(void) {}\n'
    )
    subprocess.run([*CC, "-shared", source, "-o", library], check=True)
    inside = "/site/torch/lib/libtorch_cpu.so"
    with open_file(library) as opened:
        with pytest.raises(UnsupportedError, match=r"this PyTorch 2\.13\.0 has no "):
            find_torch_target(opened, inside, tmp_path)
        library.with_name("new").write_bytes(library.read_bytes())
        library.with_name("new").replace(library)
        with pytest.raises(UnsupportedError, match="not seen: it was replaced on disk"):
            find_torch_target(opened, inside, tmp_path)


@pytest.mark.torch
def test_a_release_whose_layouts_are_not_known_is_refused_by_name(tmp_path):
    (path,) = find_torch_python().parent.parent.glob(
        "lib/python3*/site-packages/torch/lib/libtorch_cpu.so"
    )
    inside = Path("/venv/torch/lib/libtorch_cpu.so")
    (tmp_path / "venv/torch").mkdir(parents=True)
    (tmp_path / "venv/torch/version.py").write_text("__version__ = '2.9.1+cpu'\n")
    with open_file(path) as opened:
        with pytest.raises(
            UnsupportedError, match=r"not seen: it is PyTorch 2\.9\.1, and known is 2\.13\.0"
        ):
            find_torch_target(opened, str(inside), tmp_path)
        target = find_torch_target(opened, str(path), Path("/"))
    assert target.leaves
    assert {offset for offset, _ in target.probes}.isdisjoint(target.leaves)

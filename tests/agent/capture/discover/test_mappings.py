"""What ``/proc`` tells of processes whose files, threads and cgroups have names with all that may end a line."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from ingero.agent.capture.discover.cgroups import parse_memberships
from ingero.agent.capture.discover.processes import iter_mappings, open_file, read_status
from ingero.agent.capture.kernel.filesystems import is_overlay
from ingero.agent.capture.stacks.control_block import _read_tids
from ingero.agent.capture.stacks.memory import iter_regions
from ingero.agent.capture.stacks.native import _PerfMap
from ingero.agent.diagnosis import connections

MAP = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
code = mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)
print(flush=True)
sys.stdin.read()
"""
NAME_ITSELF = r"""
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"\rNSpid:\tnone\r")
print(flush=True)
sys.stdin.read()
"""

OPEN_WITHOUT_CAPABILITIES = """
import sys
from ingero.agent.capture.discover.processes import iter_mappings, open_mapped
from ingero.agent.capture.kernel.capabilities import Capability, drop_capabilities, read_capabilities
from ingero.agent.capture.stacks.memory import iter_regions, open_region

drop_capabilities(read_capabilities() - {Capability.CHECKPOINT_RESTORE, Capability.SYS_ADMIN})
pid, path = int(sys.argv[1]), sys.argv[2]
(mapping,) = [one for one in iter_mappings(pid) if one.path == path]
(region,) = [one for one in iter_regions(pid) if one.path == path]
ways = {"mapping": lambda: open_mapped(mapping), "region": lambda: open_region(pid, region)}
try:
    with ways[sys.argv[3]]() as opened:
        print(opened.file.inode)
except OSError as error:
    print(error.strerror)
"""


@contextmanager
def running(program, *arguments):
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"\n"
        yield process
        process.kill()


@pytest.mark.parametrize("end", ["\f", "\v", "\r", "\x1c", "\x85", "\u2028", " "], ids=ascii)
def test_a_mapped_file_has_its_name_whatever_is_in_it(tmp_path, end):
    path = tmp_path / f"a{end}b x 1 2 3 /c{end}"
    path.parent.mkdir()
    path.write_bytes(bytes(4096))
    with running(MAP, str(path)) as process:
        assert str(path) in [one.path for one in iter_mappings(process.pid)]
        assert str(path) in [one.path for one in iter_regions(process.pid)]
        path.unlink()
        assert str(path) in [one.path for one in iter_regions(process.pid)]


def test_a_process_gives_itself_no_number_by_its_name():
    with running(NAME_ITSELF) as process:
        fields = read_status(Path("/proc") / str(process.pid))
        assert "\r" in fields["Name"]
        assert int(fields["NSpid"].split()[0]) == process.pid
        assert process.pid in _read_tids(process.pid)
        assert _PerfMap(process.pid).find(0x1000) == ("", 0)


def test_a_cgroup_gives_a_process_no_pod_by_its_name():
    text = "0::/user.slice/a\x1c0::/kubepods/pod3f2504e0-4f89-11d3-9a0c-0305e82c3301\n"
    assert [one.path for one in parse_memberships(text)] == [text[3:-1]]


def test_an_interface_gives_another_no_errors_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "_PROC", tmp_path)
    (tmp_path / "7/net").mkdir(parents=True)
    (tmp_path / "7/net/dev").write_text(f"eth0: {'0 ' * 16}\na\x1ceth0: {'9 ' * 16}\n")
    errors = connections._read_errors(7)
    assert errors["eth0 receive errors"] == 0
    assert errors["a\x1ceth0 receive errors"] == 9


def open_without_capabilities(pid, path, way):
    command = [sys.executable, "-c", OPEN_WITHOUT_CAPABILITIES, str(pid), str(path), way]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("way", ["mapping", "region"])
def test_a_file_that_took_the_name_of_a_mapped_one_is_not_taken_for_it(tmp_path, way):
    path, new = tmp_path / "library", tmp_path / "new"
    path.write_bytes(bytes(4096))
    new.write_bytes(bytes(8192))
    with running(MAP, str(path)) as process:
        with open_file(path) as opened:
            if is_overlay(opened.fd):
                pytest.skip("overlayfs has other numbers in /proc")
        assert open_without_capabilities(process.pid, path, way) == str(path.stat().st_ino)
        new.replace(path)
        assert "another file has its name" in open_without_capabilities(process.pid, path, way)

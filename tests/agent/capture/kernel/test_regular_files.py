"""Files that a process laid out to mislead who reads them with more rights. No root."""

import fcntl
import os
import subprocess
import sys

import pytest

from ingero.agent.capture.kernel.regular_files import open_inside, open_regular, read_inside

MAX_BYTES = 64
HOLD_LEASE = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print(flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def root(tmp_path):
    """The root directory of a container; beside it lies what is not the container's."""
    (tmp_path / "secret").write_text("of the host")
    root = tmp_path / "root"
    (root / "run").mkdir(parents=True)
    (root / "run/name").write_text("inside")
    (root / "var").mkdir()
    return root


def test_links_of_an_image_lead_to_files_of_the_image(root):
    (root / "var/run").symlink_to("/run")
    (root / "link").symlink_to("var/run/name")
    assert read_inside(root, "/var/run/name", MAX_BYTES) == b"inside"
    assert read_inside(root, "/link", MAX_BYTES) == b"inside"


@pytest.mark.parametrize("name", ["absolute", "relative", "folder/secret", "../secret"])
def test_no_name_leads_out_of_the_root(root, name):
    (root / "absolute").symlink_to(root.parent / "secret")
    (root / "relative").symlink_to("../secret")
    (root / "folder").symlink_to(root.parent)
    with pytest.raises(FileNotFoundError):
        read_inside(root, name, MAX_BYTES)


def test_links_of_proc_that_lead_anywhere_are_not_followed(tmp_path):
    (tmp_path / "secret").write_text("of the host")
    with (tmp_path / "secret").open() as file, pytest.raises(OSError, match="symbolic links"):
        open_inside("/", f"/proc/self/fd/{file.fileno()}")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_regular_file_is_not_opened(root, kind):
    if kind == "pipe":
        os.mkfifo(root / "it")
    else:
        (root / "it").symlink_to("run")
    where, name = ("/", "/dev/null") if kind == "device" else (root, "/it")
    with pytest.raises(OSError, match="not a regular file"):
        open_inside(where, name)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(f"{where}/{name}")


def test_a_file_that_is_too_large_is_not_read(root):
    (root / "large").write_bytes(bytes(MAX_BYTES + 1))
    (root / "full").write_bytes(bytes(MAX_BYTES))
    assert read_inside(root, "/full", MAX_BYTES) == bytes(MAX_BYTES)
    with pytest.raises(OSError, match="too large"):
        read_inside(root, "/large", MAX_BYTES)


@pytest.mark.timeout(20)
def test_a_file_of_proc_is_not_read_whatever_it_would_say():
    assert read_inside("/", f"/proc/{os.getpid()}/status", MAX_BYTES) == b""


@pytest.mark.timeout(20)
def test_nobody_s_lease_is_waited_for(root):
    path = root / "run/name"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LEASE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout.readline() == b"\n"
        with pytest.raises(BlockingIOError):
            read_inside(root, "/run/name", MAX_BYTES)
        holder.kill()


def test_the_descriptor_is_for_reading_and_closed_by_execve(root):
    fd = open_inside(root, "/run/name")
    assert os.read(fd, MAX_BYTES) == b"inside"
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)

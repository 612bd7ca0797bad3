"""Open files of a process: by what its descriptors are called."""

import os
import socket
import subprocess
import sys

import pytest

from ingero.agent.capture.discover.processes import iter_open_files


def test_files_and_sockets_are_named_as_the_process_s_links_say(tmp_path):
    path = tmp_path / "open"
    with socket.socket() as one, path.open("w"):
        names = list(iter_open_files(os.getpid()))
        assert f"socket:[{os.fstat(one.fileno()).st_ino}]" in names
        assert str(path) in names
    assert str(path) not in list(iter_open_files(os.getpid()))


def test_process_that_is_gone_is_an_error_and_not_one_without_files():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(FileNotFoundError):
        list(iter_open_files(process.pid))

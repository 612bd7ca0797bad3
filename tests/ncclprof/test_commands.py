"""``ingero nccl-plugin`` and the line of ``ingero check``."""

import ctypes
import json
import os
import pathlib

import pytest
from click.testing import CliRunner

from ingero.agent.checks.machine import CHECKS
from ingero.agent.collectives import plugin as nccl_plugin
from ingero.cli.main import cli, run_program


def run(*args):
    result = CliRunner().invoke(cli, ["nccl-plugin", *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def find_check():
    (check,) = (check() for check in CHECKS if check.__name__ == "_check_nccl_plugin")
    return check


@pytest.fixture
def other_machine(monkeypatch):
    monkeypatch.setattr(nccl_plugin.platform, "machine", lambda: "riscv64")


def test_the_path_is_what_a_shell_exports():
    line = run("path")
    variable, _, path = line.rstrip("\n").partition("=")
    assert variable == "NCCL_PROFILER_PLUGIN"
    assert pathlib.Path(path).is_absolute()
    assert os.access(path, os.R_OK)
    told = json.loads(run("path", "--json"))
    assert told == {"variable": variable, "path": path, "interfaces": [4, 5, 6]}


def test_it_is_copied_whole_to_where_containers_see_it_and_an_older_copy_is_replaced(tmp_path):
    folder = tmp_path / "opt" / "ingero"
    assert (
        run("install", str(folder)) == f"NCCL_PROFILER_PLUGIN={folder}/libnccl-profiler-ingero.so\n"
    )
    (copy,) = folder.iterdir()
    assert copy.read_bytes() == nccl_plugin.find_plugin().read_bytes()
    assert copy.stat().st_mode & 0o777 == 0o755
    copy.write_bytes(b"an older one")
    with copy.open("rb") as loaded:
        told = json.loads(run("install", "--json", str(folder)))
        assert told == {"variable": "NCCL_PROFILER_PLUGIN", "path": str(copy)}
        assert loaded.read() == b"an older one"
    assert copy.read_bytes() == nccl_plugin.find_plugin().read_bytes()
    ctypes.CDLL(str(copy))  # it needs nothing beside it


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_program(cli, ["nccl-plugin", "install", str(tmp_path / "file" / "in")]) == 4
    assert (
        f"cannot be copied to {tmp_path}/file/in/libnccl-profiler-ingero.so"
        in capsys.readouterr().err
    )


def test_status_lists_processes_and_what_they_told(join, rings):
    assert "no process" in run("status")
    assert json.loads(run("status", "--json")) == []
    one, other = join(comm=1), join(comm=2)
    one.play(100, 200)
    other.play(100, 200)
    other.enqueue(n_channels=0)
    assert json.loads(run("status", "--json")) == [
        {"pid": os.getpid(), "api": 6, "n_comms": 2, "n_ops": 2, "n_lost": 1, "n_unplaced": 0}
    ]
    assert f"pid {os.getpid()}: interface version 6, 2 communicators, 2 collectives, 1 lost" in run(
        "status"
    )


def test_the_check_tells_what_to_set_and_who_uses_it(join, rings):
    check = find_check()
    assert check.passed
    assert f"NCCL_PROFILER_PLUGIN={nccl_plugin.find_plugin()}" in check.detail
    assert check.detail.endswith("processes that have it: 0")
    join()
    assert find_check().detail.endswith("processes that have it: 1")


def test_communicators_without_a_place_are_named_where_people_look(join, rings):
    for i in range(131):
        join(comm=1 + i)
    assert json.loads(run("status", "--json"))[0]["n_unplaced"] == 3
    assert "0 lost; on 3 more communicators no hang is seen" in run("status")
    assert find_check().detail.endswith(
        "communicators beyond its table, on which no hang is seen: 3"
    )


def test_where_it_was_not_built_the_check_and_the_command_say_so(other_machine, capsys):
    check = find_check()
    assert not check.passed
    assert not check.required
    assert (check.detail, check.fix) == (
        "the NCCL plug-in was not built for riscv64",
        "in a source tree run `make native`",
    )
    assert run_program(cli, ["nccl-plugin", "path"]) == 3
    assert "was not built for riscv64" in capsys.readouterr().err

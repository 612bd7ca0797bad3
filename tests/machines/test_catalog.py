"""Machines are chosen by name and pattern; packages are read from what apt prints."""

import pytest
from scripts.machines.catalog import MACHINES, choose_machines
from scripts.machines.fetch import Apt, FetchError, Package, parse_uris, run_tool
from scripts.machines.guest import rdma
from scripts.machines.guest.checks import KINDS, RDMA
from scripts.machines.guest.running import Ended


def test_machines_are_chosen_by_names_and_patterns_in_the_catalogue_s_order():
    assert choose_machines("") == MACHINES
    chosen = choose_machines("6.12-x86_64,6.1-*")
    assert [machine.name for machine in chosen] == ["6.1-x86_64", "6.12-x86_64", "6.1-aarch64"]


def test_what_is_to_be_checked_on_a_machine_is_known_to_its_guest():
    assert {machine.checks for machine in MACHINES} == KINDS.keys()


def test_checks_over_rdma_are_known_before_their_module_is_imported():
    assert set(RDMA) == rdma.CHECKS.keys()


def test_lines_of_a_trace_are_read_once_for_all_its_checks():
    ended = Ended(0, '{"type":"event","pid":7}\n{"type":"counts"}\n', "")
    assert ended.of_type("event") == [{"type": "event", "pid": 7}]
    assert ended.of_type("event")[0] is ended.lines[0]


def test_a_pattern_that_matches_nothing_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"no machine '5\.15'; one of: 6\.1-x86_64, "):
        choose_machines("5.15")


def test_packages_are_read_with_the_colon_of_their_versions():
    told = """Reading package lists...
'http://deb.debian.org/debian/pool/main/libb/libbpf/libbpf1_1.1.2-0_arm64.deb' libbpf1_1%3a1.1.2-0_arm64.deb 145 SHA256:ab
"""
    assert parse_uris(told) == [Package("libbpf1", "1:1.1.2-0", "libbpf1_1%3a1.1.2-0_arm64.deb")]


def test_what_could_not_be_fetched_is_said_with_the_tool_s_own_reason(tmp_path):
    script = (
        "echo 'W: a warning' >&2; echo 'E: no route to the mirror' >&2; echo more >&2; exit 100"
    )
    with pytest.raises(FetchError, match=r"^packages: E: no route to the mirror$"):
        run_tool(["/bin/sh", "-c", script], "packages")
    with pytest.raises(FetchError, match=r"^packages: /no/such: No such file or directory$"):
        run_tool(["/no/such"], "packages")


def test_a_host_without_apt_is_told_which_package_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match="there is no apt-get; install the package apt"):
        Apt(tmp_path, "x86_64", frozenset())

"""`ingero check` says what is missing, what it costs and what mends it, with root and without."""

import json
import subprocess
import sys
import tarfile

import pytest
from click.testing import CliRunner
from tests.agent.capture.kubelet import container, devices, pod, run_kubelet
from tests.support.unprivileged import AS_UNPRIVILEGED

from ingero.agent.capture.discover.cgroups import Cgroups
from ingero.agent.capture.probes.host import PROBES
from ingero.agent.checks.machine import CHECKS, _check_cgroups, check_as_traced, check_machine
from ingero.cli.main import cli
from ingero.config.environment import KUBELET_SOCKET
from ingero.config.redact import build_redacted_environment


def test_every_failed_check_says_its_cost_and_a_step():
    checks = check_machine()
    assert len(checks) == len(CHECKS) + 1 + len(PROBES)
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.detail, check.name
        assert bool(check.costs) != check.passed, check.name
        assert bool(check.fix) or check.passed, check.name


def test_the_json_has_the_documented_shape_and_exit_status_is_0():
    result = CliRunner().invoke(cli, ["check", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["all_passed"] is all(check["pass"] for check in report["checks"])
    for told, check in zip(report["checks"], check_as_traced(), strict=True):
        expected = {
            "name": check.name, "pass": check.passed, "optional": not check.required,
            "value": check.detail, "detail": check.costs, "recommendation": check.fix,
        }  # fmt: skip
        if check.name not in {"cuda libraries", "nccl plug-in"}:  # what others load meanwhile
            assert told == {name: value for name, value in expected.items() if value != ""}


@pytest.mark.kernel
def test_a_user_without_privileges_is_told_so():
    run = subprocess.run(
        [*AS_UNPRIVILEGED, sys.executable, "-m", "ingero", "check", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    checks = {check["name"]: check for check in json.loads(run.stdout)["checks"]}
    assert not checks["privileges"]["pass"]
    assert checks["privileges"]["recommendation"] == "run it with sudo"
    assert not checks["probe engine"]["pass"]
    assert "Operation not permitted" in checks["probe engine"]["value"]
    assert checks["kernel"]["pass"]


@pytest.mark.kernel
def test_root_on_this_kernel_can_probe():
    checks = {check.name: check for check in check_machine()}
    assert all(check.passed for check in checks.values() if check.required)


def test_a_kubelet_is_asked_and_its_silence_is_told_with_what_it_costs(tmp_path, monkeypatch):
    socket = tmp_path / "kubelet.sock"
    monkeypatch.setenv(KUBELET_SOCKET, str(socket))
    ask = next(check for check in CHECKS if check.__name__ == "_check_pod_resources")
    assert ask().detail.startswith(f"not Kubernetes: no {socket}")
    answer = pod("ml", "train-0", container("main", devices("nvidia.com/gpu", "GPU-a", "GPU-b")))
    with run_kubelet(socket, answer):
        assert "the kubelet answers: 1 containers, 2 devices" in ask().detail
    socket.touch()
    silent = ask()
    assert (silent.passed, silent.required) == (False, False)
    assert "UNAVAILABLE" in silent.detail
    assert silent.costs == "which devices a pod was given is not said of its processes"


def test_cgroups_outside_of_a_container_are_missed_with_what_that_costs(tmp_path):
    for pid, path in ((7, "/"), (8, "/../../pod/b"), (9, "/../../pod/c")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(f"0::{path}\n")
    assert _check_cgroups(Cgroups(tmp_path), [7, 99]).passed  # the second has ended
    missed = _check_cgroups(Cgroups(tmp_path), [7, 8, 9])
    assert (missed.passed, missed.required) == (False, False)
    assert "those of 2 processes" in missed.detail
    assert "limit" in missed.costs


def test_a_support_bundle_holds_the_report_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2-secret")
    path = tmp_path / "bundle.tar.gz"
    result = CliRunner().invoke(cli, ["check", "--json", "--support-bundle", str(path)])
    assert result.exit_code == 0
    with tarfile.open(path) as archive:
        texts = {m.name: archive.extractfile(m).read().decode() for m in archive.getmembers()}
    assert "hunter2-secret" not in "".join(texts.values())
    assert "WANDB_API_KEY=<14 bytes>" in texts["ingero-support/environment.txt"]
    assert json.loads(texts["ingero-support/check.json"])["checks"]


def test_a_support_bundle_replaces_no_file_that_nobody_said_may_go(tmp_path):
    path = tmp_path / "notes"
    path.write_text("mine")
    line = ["check", "--support-bundle", str(path)]
    refused = CliRunner().invoke(cli, line)
    assert (refused.exit_code, path.read_text()) == (2, "mine")
    assert f"{path} exists already; --force replaces it" in refused.stderr
    assert CliRunner().invoke(cli, [*line, "--force"]).exit_code == 0
    assert tarfile.is_tarfile(path)


def test_redaction_goes_by_parts_of_the_name():
    redacted = build_redacted_environment({
        "HF_TOKEN": "abc",
        "https_proxy": "http://user:password@proxy",
        "RANK": "3",
        "Db_Password": "pw",
    })
    assert redacted == (
        "Db_Password=<2 bytes>\nHF_TOKEN=<3 bytes>\nRANK=3\nhttps_proxy=<26 bytes>\n"
    )

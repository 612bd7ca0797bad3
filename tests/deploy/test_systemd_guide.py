"""Every command of the guide for systemd, in a Debian of its own under a real systemd: `make test-systemd`, minutes and PyPI.

Its network and kernel are this machine's; users, files, units, their filters of system calls and their order are its own.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.deploy.site import DEPLOY, copy_checkout, read_guide

from ingero.testing.waiting import wait_until

TREE = os.environ.get("INGERO_SYSTEMD_ROOT", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("images"),
    pytest.mark.skipif(
        not TREE or shutil.which("systemd-nspawn") is None,
        reason="INGERO_SYSTEMD_ROOT names no Debian with systemd: `make test-systemd` makes one",
    ),
]
N_UNITS = len(list((DEPLOY / "systemd").glob("*.service")))
PROBING = "CAP_BPF,CAP_PERFMON,CAP_CHECKPOINT_RESTORE,CAP_SYS_PTRACE,CAP_IPC_LOCK"
ENVIRON = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root")
CERTIFICATE = """
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost \
  -keyout /etc/ingero/echo/tls.key -out /etc/ingero/echo/tls.crt
"""
ALERTER = """
echo '{"uds_path": "/run/ingero/remediate.sock", "webhook": {"url": "http://127.0.0.1:9/"}}' > \
  /etc/ingero-alerter/config.json
"""


class Machine:
    """Runs commands as root where systemd is the first process."""

    def __init__(self, process):
        self._process = process

    def find_init(self):
        assert self._process.poll() is None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return next(iter(children.split()), None)

    def try_to(self, commands):
        files = [f"PIP_FIND_LINKS={path}" for path in [os.environ.get("PIP_FIND_LINKS")] if path]
        return subprocess.run(
            [
                "nsenter", "-t", self.find_init(), "-a", "env", "-i", *ENVIRON, *files,
                "bash", "-euxo", "pipefail", "-c", f"cd /checkout\n{commands}",
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def run(self, commands):
        done = self.try_to(commands)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + self.read_journal()
        return done.stdout

    def read_journal(self):
        return self.try_to("journalctl --no-pager -n 40 -u 'ingero*'").stdout

    def follow(self, heading=""):
        """Run the commands below a heading of the guide."""
        text = "\n".join(read_guide(heading)).replace("https://fleet:4318", "http://localhost:4318")
        return self.run(text)

    def is_running(self):
        return "running" in self.try_to("systemctl is-system-running").stdout.split()


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("systemd")
    checkout, log = copy_checkout(folder / "checkout"), folder / "log"
    links = [f"--bind-ro={path}" for path in [os.environ.get("PIP_FIND_LINKS")] if path]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                "systemd-nspawn", "--register=no", "--keep-unit", "--volatile=overlay", "-D", TREE,
                f"--bind={checkout}:/checkout", *links, f"--capability={PROBING}",
                "--system-call-filter=bpf perf_event_open", "--boot",
            ],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
    machine = Machine(process)
    try:
        wait_until(lambda: machine.find_init() and machine.is_running(), 120)
        yield machine
    finally:
        process.terminate()  # it lets systemd shut down
        process.wait(120)


def test_every_command_of_the_guide_works_in_its_order(machine):
    machine.follow()
    assert '"Server available"' in machine.follow("Fleet")
    machine.run("install -d -o ingero-echo -m 0700 /etc/ingero/echo" + CERTIFICATE)
    assert machine.follow("Echo").endswith('{"status":"ok"}')
    told = machine.follow("A GPU node")
    assert "ingero_sink_events_total" in told  # ready as soon as the unit is started
    assert " events of " in told
    assert machine.run("systemctl is-active ingero-trace") == "active\n"
    assert machine.try_to("systemctl is-active ingero-fleet-push").stdout == "inactive\n"
    machine.run(
        "install -d /etc/ingero-alerter" + ALERTER + "systemctl enable --now ingero-alerter"
    )
    machine.run("echo 'u slurm -' | systemd-sysusers -")
    assert "mode dry-run" in machine.follow("The remediator")
    machine.run("systemctl reload ingero-fleet ingero-echo")
    active = machine.run("systemctl list-units --plain --no-legend 'ingero*'")
    assert active.count(" active running ") == N_UNITS - 1, machine.read_journal()


def test_each_of_the_two_that_probe_stops_the_other_and_nothing_fails_when_all_end(machine):
    machine.run("systemctl start ingero-fleet-push")
    assert machine.try_to("systemctl is-active ingero-trace").stdout == "inactive\n"
    machine.run("systemctl start ingero-trace")
    machine.run("systemctl stop 'ingero*'")
    assert machine.run("systemctl list-units --failed --plain --no-legend") == ""

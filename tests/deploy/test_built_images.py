"""Images built from their Containerfiles by buildah, and started: `make test-images`, which takes minutes and PyPI.

With `ARCH=arm64` they are those of another processor: the wheel is built on this machine's own image, everything else runs in
qemu-user, which starts every program but the one that loads BPF.

Chroot isolation stands in for a container runtime: users, files and programs are the image's, network and kernel are this
machine's, and the root file system may be written to.
"""

import json
import os
import re
import shutil
import subprocess
from contextlib import contextmanager

import httpx
import pytest
from tests.deploy.site import ROOT
from tests.e2e.agents import health
from tests.support import local_http
from tests.support.ports import free_port

from ingero.testing.waiting import wait_until

BASE = os.environ.get("INGERO_IMAGE_BASE", "")
BUILD_BASE = os.environ.get("INGERO_IMAGE_BUILD_BASE", BASE)
IS_EMULATED = BASE != BUILD_BASE
START_S = 600 if IS_EMULATED else 60
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(30 * START_S),
    pytest.mark.xdist_group("images"),
    pytest.mark.skipif(
        not BASE or shutil.which("buildah") is None,
        reason="INGERO_IMAGE_BASE names no image to build on: `make test-images` makes one",
    ),
]
CHROOT = ("--isolation", "chroot")
PROBING = (
    "BPF", "PERFMON", "SYS_PTRACE", "CHECKPOINT_RESTORE", "DAC_READ_SEARCH", "IPC_LOCK", "SYS_ADMIN",
)  # fmt: skip
"""Those of the chart with ``privileged=false``; without the last one this isolation refuses to load BPF programs."""


def buildah(*arguments, **more):
    done = subprocess.run(
        ["buildah", *map(str, arguments)], capture_output=True, text=True, check=False, **more
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.strip()


class Image:
    """An image, and one container of it."""

    def __init__(self, name):
        self.name = name
        built = f"{name}:{BASE.rpartition('/')[2]}"
        buildah(
            "build", *CHROOT, "--layers", "--build-arg", f"BASE={BASE}",
            "--build-arg", f"BUILD_BASE={BUILD_BASE}", "-t", built,
            "-f", f"deploy/containers/Containerfile.{name}", ".", cwd=ROOT,
        )  # fmt: skip
        inspected = json.loads(buildah("inspect", "--type", "image", built))
        self.config = inspected["OCIv1"]["config"]
        self.container = buildah("from", built)

    def command(self, *arguments, mounts=None, more=()):
        """Its entry point with these arguments, as its own user."""
        mounted = [part for one in (mounts or {}).items() for part in ("-v", "{}:{}".format(*one))]
        entry = self.config["Entrypoint"]
        return [
            "buildah", "run", *CHROOT, *mounted, *more, self.container, "--", *entry,
            *map(str, arguments),
        ]  # fmt: skip

    def run(self, *arguments, **more):
        return subprocess.run(
            self.command(*arguments, **more), capture_output=True, text=True, check=False
        )

    @contextmanager
    def start(self, log, *arguments, **more):
        with log.open("wb") as out:
            process = subprocess.Popen(self.command(*arguments, **more), stdout=out, stderr=out)
        try:
            yield lambda: process.poll() is None or pytest.fail(log.read_text()[-3000:])
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def images():
    """Each image, once it is asked for; what their builds share is built once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = Image(name)
        return made[name]

    yield get
    for image in made.values():
        buildah("rm", image.container)


def answers(url, is_running):
    def ask():
        is_running()
        try:
            return local_http.get(url).status_code == 200
        except httpx.TransportError:
            return False

    return ask


def test_fleets_image_starts_as_nobody_with_its_own_configuration_and_takes_a_push(
    images, tmp_path
):
    image = images("ingero-fleet")
    assert image.config["User"] == "65532:65532"
    file = (ROOT / "deploy/containers/fleet.yaml").read_text()
    ports = {
        found: free_port() for found in re.findall(r": (?:0\.0\.0\.0|127\.0\.0\.1):(\d+)", file)
    }
    keys = {
        "receivers.otlp.protocols.grpc.endpoint": "4317",
        "receivers.otlp.protocols.http.endpoint": "4318",
        "extensions.ingero_threshold.agent_endpoint": "8080",
        "extensions.ingero_threshold.admin_endpoint": "8081",
        "extensions.health_check.endpoint": "13133",
        "extensions.zpages.endpoint": "55679",
        "exporters.prometheus.endpoint": "9090",
        "service.telemetry.metrics.address": "8888",
    }
    assert set(keys.values()) == set(ports)
    sets = [
        word for key, port in keys.items() for word in ("--set", f"{key}=127.0.0.1:{ports[port]}")
    ]
    with image.start(tmp_path / "log", *image.config["Cmd"], *sets) as is_running:
        wait_until(answers(f"http://127.0.0.1:{ports['13133']}", is_running), START_S)
        url = f"http://127.0.0.1:{ports['4318']}/v1/metrics"
        assert local_http.post(url, json=health("n1", cluster="c")).status_code == 200


def test_echos_image_starts_as_nobody_and_writes_its_file(images, tmp_path):
    image = images("ingero-echo")
    assert image.config["User"] == "65532:65532"
    (tmp_path / "auth").mkdir()
    token = tmp_path / "auth/token"
    token.write_text("t" * 32)
    os.chown(token, 65532, 65532)
    token.chmod(0o600)
    port = free_port()
    arguments = [
        "serve", "--insecure-no-tls", "--db", "/var/lib/ingero-echo/echo.db", "--auth-token-file",
        "/etc/ingero/auth/token", "--health-addr", f"127.0.0.1:{port}",
        *(word for name in ("otlp", "otlp-http", "mcp") for word in (f"--{name}-addr", f"127.0.0.1:{free_port()}")),
    ]  # fmt: skip
    mounts = {tmp_path / "auth": "/etc/ingero/auth:ro"}
    with image.start(tmp_path / "log", *arguments, mounts=mounts) as is_running:
        wait_until(answers(f"http://127.0.0.1:{port}/readyz", is_running), START_S)


def test_the_sinks_and_the_alerters_images_start_as_nobody(images, tmp_path):
    sink, alerter = free_port(), free_port()
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"uds_path": "/tmp/none.sock", "webhook": {"url": "http://[::1]:9/"}})
    )
    file.chmod(0o644)
    started = [
        (images("ingero-sink"), sink, ("--socket-path", "/tmp/none.sock"), {}),
        (images("ingero-alerter"), alerter, ("--config", "/etc/a/config.json"), {file: "/etc/a/config.json:ro"}),
    ]  # fmt: skip
    for image, port, arguments, mounts in started:
        assert image.config["User"] == "65532:65532"
        log = tmp_path / f"{image.name}.log"
        listen = ("--listen", f"127.0.0.1:{port}")
        with image.start(log, *arguments, *listen, mounts=mounts) as is_running:
            wait_until(answers(f"http://127.0.0.1:{port}/healthz", is_running), START_S)


def test_the_remediators_image_says_what_it_would_do(images, tmp_path):
    image = images("ingero-remediator")
    assert image.config["User"] == "65532:65532"
    defaults = image.run("config", "--defaults")
    assert defaults.returncode == 0, defaults.stderr
    file = tmp_path / "remediator.yaml"
    file.write_text(defaults.stdout)
    file.chmod(0o644)
    checked = image.run("validate", "/etc/r.yaml", mounts={file: "/etc/r.yaml:ro"})
    assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(IS_EMULATED, reason="qemu-user loads no BPF program")
def test_the_agents_image_traces_the_simulator_in_it(images):
    image = images("ingero")
    assert image.config["User"] == "0:0"
    assert image.config["Cmd"] == ["trace", "--record"]
    more = tuple(word for name in PROBING for word in ("--cap-add", f"CAP_{name}"))
    simulated = ("ingero", "sim", "run", "sync", "steps=11")
    done = image.run("trace", "--json", "--no-record", "--", *simulated, more=more)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    seen = [
        line["seen"] for line in lines
        if line["type"] == "counts" and line["op"] == "cudaDeviceSync"
    ]  # fmt: skip
    assert seen[-1:] == [11], done.stderr

"""Containerfiles and the compose file: what they name is there, and what compose runs works together as processes."""

import re
import ssl
import subprocess
import tomllib

import httpx
import pytest
import yaml
from tests.deploy.charts import ADDRESS
from tests.deploy.site import DEPLOY, ROOT, run_program
from tests.e2e.agents import health
from tests.support import local_http
from tests.support.ports import free_port

from ingero.testing.waiting import wait_until

FOLDER = DEPLOY / "containers"
FILES = sorted(FOLDER.glob("Containerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


def test_every_program_has_a_containerfile():
    # The first is another name of ingero-sink; the second is started by slurmd, on the node itself.
    programs = set(PROJECT["scripts"]) - {"straggler-sink", "ingero-health-check"}
    assert {file.name.removeprefix("Containerfile.") for file in FILES} == programs


@every_file
def test_a_containerfile_leaves_its_compiler_behind_and_starts_its_program(file):
    text = file.read_text()
    name = file.name.removeprefix("Containerfile.")
    stages = re.findall(r"^FROM (.*)$", text, re.MULTILINE)
    assert stages == ["${BUILD_BASE} AS wheel", "${BASE} AS build", "${BASE}"]
    assert f'ENTRYPOINT ["{name}"]' in text
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (user,) = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert user == ("0:0" if name == "ingero" else "65532:65532")
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())


def test_a_build_gets_every_source_that_the_wheel_needs():
    text = FILES[0].read_text()
    backend = (ROOT / "scripts/build_native.py").read_text()
    for folder in ("bpf", "gpusim", "ncclprof"):
        assert f"COPY {folder} {folder}" in text
        assert folder in backend


def test_what_the_compose_file_mounts_and_builds_is_there():
    for name, service in COMPOSE["services"].items():
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).exists()
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith(".") and "/secrets/" not in source:
                assert (FOLDER / source).exists(), name


@pytest.mark.slow
def test_what_compose_runs_works_together(tmp_path):
    subprocess.run([str(FOLDER / "make-secrets"), str(tmp_path)], check=True)
    ports = {}

    def localize(text):
        """With places and ports of this test, and its name for Echo."""
        for inside, made in MOUNTED.items():
            text = text.replace(inside, str(tmp_path / made))
        text = text.replace("/var/lib/ingero-echo", str(tmp_path))
        port = ports.setdefault("echo 4318", free_port())
        return text.replace("https://echo:4318", f"https://localhost:{port}")

    def number(program, text):
        return ADDRESS.sub(
            lambda found: f"127.0.0.1:{ports.setdefault(f'{program} {found[1]}', free_port())}",
            text,
        )

    for program in ("echo", "fleet"):
        text = (FOLDER / f"compose-{program}.yaml").read_text()
        (tmp_path / f"{program}.yaml").write_text(number(program, localize(text)))
    token = (tmp_path / "token").read_text().strip()
    environ = COMPOSE["services"]["echo"]["environment"]
    echo = run_program(
        tmp_path, "echo", "ingero-echo", "serve", "--config", tmp_path / "echo.yaml",
        "--set", "min_free_space=1MiB", environ=environ,
    )  # fmt: skip
    fleet = run_program(
        tmp_path, "fleet", "ingero-fleet", "--config", tmp_path / "fleet.yaml",
        environ=dict(line.split("=") for line in (tmp_path / "fleet.env").read_text().splitlines()),
    )  # fmt: skip
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    with echo as (store, log), fleet as (collector, fleet_log):

        def answers(url):
            assert store.poll() is None, log.read_text()
            assert collector.poll() is None, fleet_log.read_text()
            try:
                return local_http.get(url).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(lambda: answers(f"http://127.0.0.1:{ports['echo 8080']}/readyz"), 60)
        wait_until(lambda: answers(f"http://127.0.0.1:{ports['fleet 13133']}"), 60)
        url = f"http://127.0.0.1:{ports['fleet 4318']}/v1/metrics"
        assert local_http.post(url, json=health("n1", cluster="c")).status_code == 200

        def kept():
            answer = local_http.post(
                f"https://localhost:{ports['echo 8081']}/api/v2/sql",
                json={"sql": "SELECT DISTINCT node_id FROM events", "time_window": "99999d"},
                headers={"authorization": f"Bearer {token}"}, verify=context, timeout=30,
            )  # fmt: skip
            assert answer.status_code == 200, answer.text
            return "n1" in answer.text

        wait_until(kept, 60)


MOUNTED = {
    volume.split(":")[1]: volume.split(":")[0].removeprefix("./secrets/")
    for service in ("echo", "fleet")
    for volume in COMPOSE["services"][service]["volumes"]
    if volume.startswith("./secrets/")
}


def test_the_configuration_of_the_image_is_the_shipped_one_but_for_one_address():
    shipped = yaml.safe_load((ROOT / "src/ingero/fleet/fleet-config.yaml").read_text())
    shipped["service"]["telemetry"]["metrics"]["address"] = "0.0.0.0:8888"
    assert yaml.safe_load((FOLDER / "fleet.yaml").read_text()) == shipped

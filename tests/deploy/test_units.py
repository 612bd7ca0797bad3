"""The systemd units: verified by systemd, and their command lines really started under what they forbid."""

import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
from functools import cache
from pathlib import Path

import pytest
import trustme
import yaml
from tests.deploy.site import BIN, DEPLOY, ROOT, SERVING, read_guide, wait_for_page

from ingero.cli.main import cli
from ingero.echo.service.app import STATUS_DEAD
from ingero.errors import ConfigError, StoreError
from ingero.remediation.config import BrakesConfig
from ingero.testing.fleet import build_fleet_config

FOLDER = DEPLOY / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
PROGRAMS = (
    "alerter",
    "echo",
    "fleet",
    "fleet-push",
    "remediator",
    "sink",
    pytest.param("trace", marks=pytest.mark.kernel),
)
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze (Debian: systemd) is not installed",
)
READY = {
    "alerter": SERVING,
    "echo": re.compile(r"(127\.0\.0\.1:\d+)"),
    "fleet": re.compile(r"(running \d+ pipelines)"),
    "fleet-push": re.compile(r"(calibrating|pushed|taken)"),
    "remediator": SERVING,
    "sink": SERVING,
    "trace": SERVING,
}
PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1
"""linux/prctl.h, Linux 6.3: what MemoryDenyWriteExecute refuses, refused by the kernel itself."""


def read_unit(name):
    """Values by key of a unit's ``[Service]``, in their order."""
    found = {}
    for line in (FOLDER / f"ingero-{name}.service").read_text().splitlines():
        key, is_set, value = line.partition("=")
        if is_set and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_the_remediators_stop_file_is_in_a_folder_of_its_own_unit():
    (folder,) = read_unit("remediator")["StateDirectory"]
    assert Path(BrakesConfig().stop_file).parent == Path("/var/lib") / folder


def place(text, folder):
    """The same with every folder of the machine below this one, and with our programs' own places."""
    text = re.sub(r"/usr/bin/(?=ingero)", f"{BIN}/", text)
    return re.sub(r"(?<![\w/])/(etc|run|var/lib)(?=/ingero)", rf"{folder}/\1", text)


def prepare(name, folder):
    """What an administrator puts in place, on ports that the kernel chooses."""
    for path in (
        "etc/ingero/echo",
        "etc/ingero-alerter",
        "run/ingero",
        "var/lib/ingero-echo",
        "var/lib/ingero",
    ):
        (folder / path).mkdir(parents=True)
    if name == "fleet":
        (folder / "etc/ingero/fleet.yaml").write_text(yaml.safe_dump(build_fleet_config(nccl={})))
    if name == "alerter":
        config = {
            "uds_path": str(folder / "run/ingero/x.sock"),
            "webhook": {"url": "http://127.0.0.1:9/"},
        }
        (folder / "etc/ingero-alerter/config.json").write_text(str(config).replace("'", '"'))
    if name == "remediator":
        policy = f"action: {{slurm: {{}}}}\njournal: {{file: {folder}/journal.db}}\nlisten: 127.0.0.1:0\n"
        (folder / "etc/ingero/remediator.yaml").write_text(policy)
    if name == "echo":
        shipped = re.sub(r"(\d+\.){3}\d+:\d+", "127.0.0.1:0", (FOLDER / "echo.yaml").read_text())
        (folder / "etc/ingero/echo.yaml").write_text(place(shipped, folder))
        made = trustme.CA().issue_cert("localhost")
        made.cert_chain_pems[0].write_to_path(folder / "etc/ingero/echo/tls.crt")
        bearers = "- {key_name: o, token: oooooooooooooooooooo, allowed_clusters: ['*']}\n"
        for path, text in (
            ("tls.key", made.private_key_pem.bytes().decode()),
            ("bearers.yaml", bearers),
        ):
            (folder / "etc/ingero/echo" / path).touch(mode=0o600)
            (folder / "etc/ingero/echo" / path).write_text(text)


def command_of(name, folder):
    """The unit's command line as systemd would run it, below ``folder``."""
    more = {
        "FLEET_ARGS": "--fleet-endpoint http://127.0.0.1:9 --fleet-cluster-id c --stub "
        f"--fleet-persist-path {folder}/baseline.json",
        "TRACE_ARGS": "",
    }
    (line,) = read_unit(name)["ExecStart"]
    words = []
    for word in shlex.split(place(line, folder)):
        words += shlex.split(more[word[1:]]) if word.startswith("$") else [word]
    if name == "sink":
        words[words.index(":9464")] = "127.0.0.1:0"
    if name == "trace":
        words[words.index("127.0.0.1:9465")] = "127.0.0.1:0"
    return [*words, "--listen", "127.0.0.1:0"] if name == "alerter" else words


def deny_write_execute():
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0)


@cache
def call_sets():
    """System calls by systemd's names of sets, with sets in sets resolved."""
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    sets = {}
    for line in listed.splitlines():
        word = line.strip()
        if line.startswith("@"):
            sets[word] = members = set()
        elif line.startswith("    ") and not word.startswith("#"):
            members.add(word)

    def resolve(word):
        return set().union(*map(resolve, sets[word])) if word.startswith("@") else {word}

    return {name: resolve(name) for name in sets}


def allowed_calls(name):
    """What a unit's ``SystemCallFilter`` lines leave, as systemd reads them: in their order, ``~`` takes away."""
    allowed = set(call_sets()["@default"])
    for line in read_unit(name)["SystemCallFilter"]:
        is_denied = line.startswith("~")
        for word in line.removeprefix("~").split():
            calls = call_sets().get(word, {word})
            allowed = allowed - calls if is_denied else allowed | calls
    return allowed


@needs_systemd
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path):
    for unit in UNITS:
        text = unit.read_text().replace("/usr/bin/ingero", f"{BIN}/ingero")
        (tmp_path / unit.name).write_text(text)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_exposure_that_the_guide_names_is_what_systemd_computes(unit):
    said = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(unit)],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert level, said
    guide = (ROOT / "docs/guides/systemd.md").read_text()
    (named,) = re.findall(rf"^\| `{unit.name}` \|.*\| ([\d.]+) \|$", guide, re.MULTILINE)
    assert abs(float(level[1]) - float(named)) <= 0.3  # each version of systemd weighs anew


@needs_systemd
@pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace (Debian: strace) is not installed"
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_starts_works_and_ends_with_no_call_that_its_unit_refuses(name, tmp_path):
    prepare(name, tmp_path)
    calls, log = tmp_path / "calls", tmp_path / "log"
    command = [
        "strace",
        "-f",
        "-qq",
        "-c",
        "-U",
        "name",
        "-o",
        str(calls),
        *command_of(name, tmp_path),
    ]
    environ = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONUNBUFFERED": "1"}
    denies = "MemoryDenyWriteExecute" in read_unit(name)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environ, start_new_session=True,
            preexec_fn=deny_write_execute if denies else None,  # noqa: PLW1509 -- no other thread forks here
        )  # fmt: skip
    try:
        wait_for_page(process, log, READY[name])
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
    made = set(re.findall(r"^[a-z]\w+$", calls.read_text(), re.MULTILINE)) - {"syscall", "total"}
    assert {"execve", "openat"} <= made, log.read_text()
    assert made - allowed_calls(name) == set()


def test_the_shipped_files_of_echo_are_what_the_unit_reads():
    (line,) = read_unit("echo")["ExecStart"]
    assert "--config /etc/ingero/echo.yaml" in line
    config = yaml.safe_load((FOLDER / "echo.yaml").read_text())
    ports = {
        key: value.rpartition(":")[2] for key, value in config.items() if key.endswith("_addr")
    }
    assert not {"4317", "4318", "8080", "8081"} & set(ports.values())


def test_an_echo_that_stopped_writing_is_started_again_and_one_that_cannot_open_its_database_is_not():
    assert read_unit("echo")["Restart"] == ["on-failure"]
    (line,) = read_unit("echo")["RestartPreventExitStatus"]
    prevented = {int(status) for status in line.split()}
    assert STATUS_DEAD not in prevented | {0}
    assert {ConfigError.exit_code, StoreError.exit_code} == prevented


@pytest.mark.parametrize("name", ["echo", "fleet"])
def test_the_user_of_a_unit_is_made_by_the_shipped_file(name):
    (user,) = read_unit(name)["User"]
    assert re.search(rf"^u {user} -", (FOLDER / "ingero.sysusers.conf").read_text(), re.MULTILINE)


def test_each_heading_of_the_guide_with_commands_is_run():
    guide = (ROOT / "docs/guides/systemd.md").read_text()
    headings = re.findall(r"^## (.*)$", guide, re.MULTILINE)
    with_commands = [heading for heading in headings if read_guide(heading)]
    assert with_commands == ["Fleet", "Echo", "A GPU node", "The remediator"]


@needs_systemd
def test_the_guides_installation_puts_every_unit_and_user_in_place(tmp_path):
    lines = read_guide()
    assert [line.split()[0] for line in lines] == [
        "python3", "/opt/ingero/bin/pip", "ln", "cp", "cp", "systemd-sysusers", "systemctl",
    ]  # fmt: skip
    for folder in ("etc/systemd/system", "usr/lib/sysusers.d"):
        (tmp_path / folder).mkdir(parents=True)
    here = [re.sub(r" (?=/(?:etc|usr)/)", f" {tmp_path}", line) for line in lines[3:5]]
    run_lines([*here, f"systemd-sysusers --root={tmp_path}"], tmp_path)
    assert {path.name for path in (tmp_path / "etc/systemd/system").iterdir()} == {
        unit.name for unit in UNITS
    }
    made = (tmp_path / "etc/passwd").read_text()
    assert all(f"ingero-{name}:" in made for name in ("fleet", "echo"))


@pytest.mark.parametrize("heading", ["Fleet", "Echo", "The remediator"])
def test_the_commands_of_the_guide_leave_a_configuration_that_is_valid(heading, tmp_path):
    left_out = ("systemctl", "curl", "chown", "journalctl")
    lines = [line for line in read_guide(heading) if not line.startswith(left_out)]
    assert len(lines) >= 3
    prepare(heading.lower().removeprefix("the "), tmp_path)
    run_lines(lines[:-1], tmp_path)
    if heading == "Echo":  # the shipped file names the certificate where the guide puts it
        text = (tmp_path / "etc/ingero/echo.yaml").read_text()
        (tmp_path / "etc/ingero/echo.yaml").write_text(place(text, tmp_path))
    run_lines(lines[-1:], tmp_path)


@pytest.mark.parametrize(
    ("name", "variable"), [("fleet-push", "FLEET_ARGS"), ("trace", "TRACE_ARGS")]
)
def test_an_agents_command_takes_the_arguments_that_the_guide_puts_into_its_file(
    name, variable, tmp_path
):
    lines = [line for line in read_guide("A GPU node") if line.startswith(("install", "echo"))]
    (tmp_path / "etc").mkdir()
    run_lines(lines, tmp_path)
    (file,) = read_unit(name)["EnvironmentFile"]
    assert file.removeprefix("-") == f"/etc/ingero/{name}.env"
    key, _, arguments = (tmp_path / f"etc/ingero/{name}.env").read_text().partition("=")
    assert key == variable
    with cli.commands[name].make_context(name, shlex.split(arguments)) as context:
        assert any("fleet:4318" in str(value) for value in context.params.values())


def test_the_alerters_unit_runs_the_guides_configuration_with_secrets_where_the_guide_puts_them(
    tmp_path,
):
    """Its user is one of systemd's making: what root alone may read has to come by the environment."""
    prepare("alerter", tmp_path)
    (given := tmp_path / "given").mkdir()
    guide = (ROOT / "docs/guides/alerter.md").read_text()
    (config,) = re.findall(r"```json\n(.*?)```", guide, re.DOTALL)
    (given / "config.json").write_text(place(config, tmp_path))
    for name in ("slack", "token"):
        (given / name).write_text("https://hooks.slack.example/s3cret\n")
    (given / "env").write_text("PAGERDUTY_KEY=s3cret\n")
    lines = read_guide("Under systemd", "alerter")
    (group,) = read_unit("alerter")["SupplementaryGroups"]
    users = (FOLDER / "ingero.sysusers.conf").read_text()
    assert re.search(rf"^g ingero-events {group}$", users, re.MULTILINE)
    kept = [line.replace(" -g ingero-events", "") for line in lines if "systemctl" not in line]
    run_lines(kept, tmp_path, given)
    files = {path.name: path for path in (tmp_path / "etc/ingero-alerter").iterdir()}
    modes = {name: path.stat().st_mode & 0o777 for name, path in files.items()}
    assert modes == {"config.json": 0o644, "env": 0o600, "slack": 0o640, "token": 0o640}
    (file,) = read_unit("alerter")["EnvironmentFile"]
    assert place(file, tmp_path) == f"-{files['env']}"
    environ = dict(line.split("=") for line in files["env"].read_text().splitlines())
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command_of("alerter", tmp_path), stdout=out, stderr=out, env=environ
        )
    try:
        wait_for_page(process, log, READY["alerter"])
    finally:
        process.terminate()
        assert process.wait(60) == 0
    assert "telling slack, pagerduty, webhook" in log.read_text()


@pytest.mark.parametrize("name", ["alerter", "fleet", "remediator"])
def test_a_unit_whose_file_takes_variables_reads_them_from_a_file_that_need_not_be_there(name):
    (file,) = read_unit(name)["EnvironmentFile"]
    assert file.startswith("-/etc/ingero")


def run_lines(lines, folder, cwd=ROOT):
    script = place("\n".join(lines), folder).replace("-o ingero-echo ", "")
    environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-eux", "-c", script],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""What is released: the same bits from every folder, a bill of materials, and a wheel that works by itself."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from tests.deploy.site import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distribution")]
SOURCES = (
    "src", "bpf", "gpusim", "ncclprof", "scripts", "requirements",
    "hatch_build.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore",
)  # fmt: skip
COMPILED = shutil.ignore_patterns("__pycache__", "*.o", "*.so*", "x86_64", "aarch64")
EPOCH = "1790000000"


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The files of `scripts/dist`, run in this checkout, by their kind; it holds its bill of materials against the schema."""
    out = tmp_path_factory.mktemp("dist")
    environ = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    subprocess.run([ROOT / "scripts/dist", out], check=True, env=environ, capture_output=True)
    kinds = (".whl", ".tar.gz", ".cdx.json", ".sha256")
    found = {kind: list(out.glob(f"*{kind}")) for kind in kinds}
    assert {kind: len(files) for kind, files in found.items()} == dict.fromkeys(kinds, 1)
    return {kind: file for kind, (file,) in found.items()}


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_another_folder_another_umask_and_another_time_give_the_same_bits(released, tmp_path):
    """Of the sources alone: everything is compiled again."""
    tree = tmp_path / "deeper" / "another checkout"
    tree.mkdir(parents=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, tree / name, ignore=COMPILED, copy_function=shutil.copy, symlinks=True
            )
        else:
            shutil.copy(source, tree / name)
    assert not list(tree.rglob("*.o"))
    out = tmp_path / "out"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", out],
        cwd=tree, check=True, capture_output=True, umask=0o077,
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "TZ": "Asia/Tokyo"},
    )  # fmt: skip
    for kind in (".whl", ".tar.gz"):
        (built,) = out.glob(f"*{kind}")
        assert built.name == released[kind].name
        assert digest(built) == digest(released[kind]), find_differences(built, released[kind])


def test_nothing_that_was_compiled_tells_where_its_compiler_is(released):
    """zig compiles its start files once for a machine: what they tell of that place is in every program linked later."""
    with zipfile.ZipFile(released[".whl"]) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist()}
    compiled = {name: content for name, content in contents.items() if content[:4] == b"\x7fELF"}
    assert len(compiled) > 10
    traces = (str(ROOT).encode(), b"ziglang")
    assert [name for name, one in compiled.items() if any(trace in one for trace in traces)] == []


def find_differences(one, other):
    """Files of two wheels that differ, for the message."""
    if one.suffix != ".whl":
        return one.name
    crcs = [
        {item.filename: item.CRC for item in zipfile.ZipFile(file).infolist()}
        for file in (one, other)
    ]
    return sorted(
        name for name in crcs[0].keys() | crcs[1].keys() if len({c.get(name) for c in crcs}) > 1
    )


def test_the_checksums_are_of_the_files(released):
    named = dict(reversed(line.split()) for line in released[".sha256"].read_text().splitlines())
    files = [file for kind, file in released.items() if kind != ".sha256"]
    assert named == {file.name: digest(file) for file in files}


def test_the_bill_of_materials_lists_what_the_wheel_brings(released):
    text = released[".cdx.json"].read_text()
    bill = json.loads(text)
    assert bill["metadata"]["component"]["name"] == "ingero"
    assert bill["metadata"]["timestamp"].startswith("2026-09-21T")  # EPOCH, not now
    listed = {one["name"].lower(): one for one in bill["components"]}
    assert {"numpy", "grpcio", "duckdb", "bcrypt", "clickhouse-connect"} <= set(listed)
    assert not {"pytest", "cyclonedx-bom", "hatchling"} & set(listed)
    assert all(one["purl"].startswith("pkg:pypi/") for one in listed.values())
    assert "file:" not in text  # nor any other trace of where it was made


def test_the_guides_signature_holds_and_a_changed_file_is_found(released, tmp_path):
    """Its commands as they stand, in a folder with the files of this build."""
    guide = (ROOT / "docs/guides/releases.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", guide, re.DOTALL)
    assert blocks[0].startswith("make dist\n")
    sign, verify = blocks[1:]
    (tmp_path / "dist").mkdir()
    for file in released.values():
        shutil.copy(file, tmp_path / "dist")
    key = tmp_path / "release_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    public = key.with_suffix(".pub").read_text()
    (tmp_path / "allowed_signers").write_text(f"release@example.com {public}")

    def shell(commands):
        return subprocess.run(
            ["bash", "-euc", commands], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    done = shell(sign)
    assert done.returncode == 0, done.stderr
    done = shell(verify)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = tmp_path / "dist" / released[".whl"].name
    wheel.write_bytes(wheel.read_bytes()[:-1])
    assert shell(verify).returncode == 1
    sums = tmp_path / "dist" / released[".sha256"].name
    sums.write_text(sums.read_text().replace("a", "b"))
    assert "incorrect signature" in shell(verify).stderr.lower()


@pytest.fixture(scope="module")
def empty(released, tmp_path_factory):
    """Programs of an environment that has the wheel with the extra `agent`, and what that brings."""
    folder = tmp_path_factory.mktemp("empty")
    uv = [str(ROOT / ".venv/bin/uv")]
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, folder / "env"], check=True)
    python = folder / "env/bin/python"
    wheel = f"{released['.whl']}[agent]"
    subprocess.run([*uv, "pip", "install", "-q", "--python", python, wheel], check=True)
    return folder / "env/bin"


def run(empty, program, *arguments):
    """Without the checkout: neither its folder nor its environment."""
    environ = {"PATH": f"{empty}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(empty)}
    return subprocess.run(
        [empty / program, *arguments],
        capture_output=True, text=True, cwd=empty, env=environ, check=False, timeout=60,
    )  # fmt: skip


def test_the_installed_agent_runs_its_simulator_and_says_what_another_extra_brings(empty):
    done = run(empty, "ingero", "sim", "run", "sync", "steps=11", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calls"]["cudaDeviceSynchronize"]["calls"] == 11
    assert run(empty, "ingero-sink", "--help").returncode == 0
    refused = run(empty, "ingero-fleet", "config", "--defaults")
    assert refused.returncode == 3
    assert "ingero[fleet]" in refused.stderr, refused.stderr


@pytest.mark.kernel
def test_the_installed_agent_traces(empty):
    traced = [empty / "ingero", "sim", "run", "sync", "steps=11"]
    done = run(empty, "ingero", "trace", "--json", "--no-record", "--", *traced)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    seen = [
        line["seen"] for line in lines
        if line["type"] == "counts" and line["op"] == "cudaDeviceSync"
    ]  # fmt: skip
    assert seen[-1:] == [11], done.stderr

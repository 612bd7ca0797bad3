"""Generated pages say what the code says."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ingero.cli.entry_points import PROGRAMS
from ingero.cli.reference import PAGES, PLAIN, find_programs
from ingero.config.describe import iter_keys
from ingero.fleet.builtin import FACTORIES
from ingero.fleet.config import ServiceConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What `make docs` writes; a process of its own, since click keeps a command's first help option for good."""
    folder = tmp_path_factory.mktemp("reference")
    subprocess.run([sys.executable, "-m", "ingero.cli.reference", folder], check=True)
    return folder


@pytest.mark.parametrize("name", PAGES)
def test_page_is_what_make_docs_would_write(written, name):
    page = ROOT / "docs" / "reference" / name
    assert page.read_text() == (written / name).read_text(), f"run `make docs`: {name} is behind"


def test_every_key_and_metric_of_every_component_is_on_its_page():
    config, metrics = PAGES["fleet-config.md"](), PAGES["fleet-metrics.md"]()
    for factory in FACTORIES:
        for key in iter_keys(factory.config):
            assert f"| `{key.path}` |" in config
        for metric in factory.metrics:
            assert f"| `{metric.name}` |" in metrics


def test_every_key_of_service_has_a_description():
    assert [key.path for key in iter_keys(ServiceConfig) if not key.description] == []


def test_every_console_script_is_described():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    plain = {f"{module}:main": name for module, (name, _) in PLAIN.items()}
    assert scripts.keys() == PROGRAMS.keys() | plain.values()
    for name, value in scripts.items():
        assert plain.get(value, "") == name or value.startswith("ingero.cli.entry_points:run_")
    assert find_programs().keys() == PROGRAMS.keys() - {"straggler-sink"} | {"ingero-sink"}
    page = PAGES["cli.md"]()
    assert all(f"\n## {name}\n" in page for name, _ in PLAIN.values())

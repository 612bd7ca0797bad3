"""Each program starts with what its extra installs: no module of it needs a package that the extra does not bring."""

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, distributions

import pytest

IMPORT_ALL = """
import importlib, json, pkgutil, sys
for room in sys.argv[1:]:
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, f"{room}."):
        if "clickhouse" not in module.name:
            importlib.import_module(module.name)
print(json.dumps([one.__file__ for one in list(sys.modules.values()) if getattr(one, "__file__", None)]))
"""
ROOMS = {
    "echo": ("ingero.echo", "ingero.serving.otlp"),
    "fleet": ("ingero.fleet", "ingero.serving.otlp"),
}
"""The agent's optional parts are imported where they are used, and say which extra they are of."""

OPTIONAL = {
    "backports-zstd", "bcrypt", "grpcio-health-checking", "pandas", "python-dateutil", "setuptools",
}  # fmt: skip
"""What libraries of ours import where it is there, and do without."""


def normalize(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def find_brought(wanted, extra=""):
    """Distributions that a requirement installs here, by name: itself, and what it needs with this extra."""
    found, left = set(), [(normalize(wanted), extra)]
    while left:
        name, chosen = left.pop()
        if name in found and not chosen:
            continue
        found.add(name)
        try:
            needs = distribution(name).requires or ()
        except PackageNotFoundError:  # for another platform
            continue
        for need in needs:
            base, _, marker = need.partition(";")
            asked = re.search(r"extra == [\"\']([\w-]+)", marker)
            if asked and asked[1] != chosen:
                continue
            named = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", base.strip())
            left.append((normalize(named[1]), named[2] or ""))
    return found


@pytest.fixture(scope="module")
def owners():
    """Distribution by the path of each of its files."""
    named = [(one, normalize(one.name)) for one in distributions()]  # each time a name is parsed
    return {
        str(one.locate_file(file)): name
        for one, name in named
        for file in one.files or ()
        if file.suffix in {".py", ".so"}
    }


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(ROOMS))
def test_modules_of_a_program_import_only_what_its_extra_brings(extra, owners):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *ROOMS[extra]],
        capture_output=True,
        text=True,
        check=True,
    )
    used = {owners[path] for path in json.loads(done.stdout) if path in owners}
    assert len(used) > 5
    assert used - find_brought("ingero", extra) - {"ingero", *OPTIONAL} == set()

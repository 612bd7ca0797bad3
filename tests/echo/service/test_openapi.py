"""The document and the server say the same: schemathesis asks, and finds no contradiction."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance
from tests.echo.service.conftest import ALL, collectives, health
from tests.echo.serving import Served
from tests.support import local_http

from ingero.otlp.names import Signal

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")

JSON, LINES, ARROW = (
    "application/json",
    "application/x-ndjson",
    "application/vnd.apache.arrow.stream",
)
HEADERS = {"authorization": f"Bearer {ALL}"}

SQL_PATHS = {"/api/v2/sql", "/api/v2/tools/fleet.cluster.run_analysis"}


@pytest.fixture(scope="module")
def document(site):
    return local_http.get(f"{site.url}/api/v2/openapi.json", headers=HEADERS).json()


def test_the_document_lists_every_tool_and_resolves_its_own_references(document):
    assert document["openapi"] == "3.1.0"
    assert "/api/v2/tools/fleet.cluster.find_stragglers" in document["paths"]
    assert "#/$defs/" not in str(document)


def ask_with(operation, excluded, accept):
    n_asked = 0

    @settings(
        max_examples=4,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def ask_it(case):
        nonlocal n_asked
        n_asked += 1
        case.call_and_validate(headers=HEADERS | {"accept": accept}, excluded_checks=excluded)

    ask_it()
    return n_asked


def test_the_document_names_every_form_of_an_answer(document):
    for path, operations in document["paths"].items():
        is_asked = path.startswith("/api/v2/tools/fleet") or path == "/api/v2/sql"
        answer = operations["post" if is_asked else "get"]["responses"]["200"]
        assert set(answer["content"]) == ({JSON, LINES, ARROW} if is_asked else {JSON}), path
    stragglers = document["paths"]["/api/v2/tools/fleet.cluster.find_stragglers"]["post"]
    line = stragglers["responses"]["200"]["content"][LINES]["schema"]["contentSchema"]
    assert {"$ref": "#/components/schemas/Straggler"} in line["anyOf"]


def test_a_tool_wants_the_body_that_the_document_says_it_wants(site, document):
    for path, operations in document["paths"].items():
        if path.startswith("/api/v2/tools/fleet"):
            assert operations["post"]["requestBody"]["required"]
            for body in (b"", b"{}", b"null", b"[]", b'{"args":null}', b'{"args":[]}'):
                headers = HEADERS | {"content-type": JSON}
                refused = local_http.post(f"{site.url}{path}", headers=headers, content=body)
                assert (refused.status_code, refused.json()["code"]) == (400, "invalid_arguments")


def test_a_get_path_says_which_methods_it_takes(site):
    for path in ("/api/v2/tools/list", "/api/v2/whoami", "/api/versions"):
        answer = local_http.post(f"{site.url}{path}", headers=HEADERS, json={})
        assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.slow
@pytest.mark.parametrize("accept", [LINES, ARROW])
def test_schemathesis_finds_no_contradiction_in_the_other_forms(site, document, accept):
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=site.url)
    n_asked = 0
    for operation in (found.ok() for found in schema.get_all_operations()):
        excluded = [ignored_auth]  # it asks again with our header on; test_access.py holds this
        if operation.path in SQL_PATHS:
            excluded.append(positive_data_acceptance)  # no schema says what is SQL
        n_asked += ask_with(operation, excluded, accept)
    assert n_asked > 60


CONFIG = """
[[operations]]
include-path = ["/api/v2/sql", "/api/v2/tools/fleet.cluster.run_analysis"]
# No schema says which text is SQL: nonsense is refused with 400.
checks.positive_data_acceptance.expected-statuses = ["2xx", "400"]
"""


@pytest.mark.slow
def test_schemathesis_passes_with_every_check_and_phase(tmp_path):
    """The tool itself, on the program itself: what another team would run."""
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    limits = {"rate_burst": 1_000_000, "max_in_flight": 1000, "sql_timeout": "5s"}
    with Served(tmp_path, **limits) as echo:
        now_ns = time.time_ns()
        assert echo.push(health("c1", now_ns)).status_code == 200
        assert echo.push(collectives("c1", now_ns), signal=Signal.LOGS).status_code == 200
        command = [str(SCHEMATHESIS), "--config-file", str(config), "run"]
        command += [f"{echo.url}/api/v2/openapi.json", "-H", f"Authorization: Bearer {ALL}"]
        command += ["--phases", "examples,coverage,fuzzing", "--checks", "all", "-n", "4"]
        command += ["--continue-on-failure", "--no-color", "--max-time", "30"]
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
        assert "Tested: 25" in found.stdout
        assert "Traceback" not in echo.log.read_text()

"""The document and the server say the same: schemathesis asks, and finds no contradiction."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance
from tests.echo.service.conftest import ALL

JSON, LINES, ARROW = (
    "application/json",
    "application/x-ndjson",
    "application/vnd.apache.arrow.stream",
)
HEADERS = {"authorization": f"Bearer {ALL}"}

SQL_PATHS = {"/api/v2/sql", "/api/v2/tools/fleet.cluster.run_analysis"}


@pytest.fixture(scope="module")
def document(site):
    return httpx.get(f"{site.url}/api/v2/openapi.json", headers=HEADERS).json()


def test_the_document_lists_every_tool_and_resolves_its_own_references(document):
    assert document["openapi"] == "3.1.0"
    assert "/api/v2/tools/fleet.cluster.find_stragglers" in document["paths"]
    assert "#/$defs/" not in str(document)


def ask_with(operation, excluded, accept):
    n_asked = 0

    @settings(
        max_examples=12 if accept == "*/*" else 4,
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


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["*/*", LINES, ARROW])
def test_schemathesis_finds_no_contradiction(site, document, accept):
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=site.url)
    n_asked = 0
    for operation in (found.ok() for found in schema.get_all_operations()):
        excluded = [ignored_auth]  # it asks again with our header on; test_access.py holds this
        if operation.path in SQL_PATHS:
            excluded.append(positive_data_acceptance)  # no schema says what is SQL
        n_asked += ask_with(operation, excluded, accept)
    assert n_asked > (100 if accept == "*/*" else 60)

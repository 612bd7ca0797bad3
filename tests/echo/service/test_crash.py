"""A defect of ours is one request's: answered 500 with its id, counted, in the audit log, and nobody else's trouble."""

import logging
import re

import pytest
from tests.echo.service.conftest import ONE, TWO, ask
from tests.support import local_http

from ingero.echo.service import api, executor

DEFECT = "a secret of the program"


def fail(*given, **more):
    raise ZeroDivisionError(DEFECT)


WHERE = {
    "route": (api, "encode_metrics", "GET", "/metrics", "metrics"),
    "tool": (executor, "get_query", "POST", "/api/v2/tools/fleet.cluster.summary", "tools"),
    "sql": (executor, "get_query", "POST", "/api/v2/sql", "sql"),
}


def n_failed(echo, handler):
    text = local_http.get(f"{echo.url}/metrics", headers={"authorization": f"Bearer {ONE}"}).text
    found = re.search(
        rf'^ingero_echo_bearer_requests_total{{bearer="\w+",handler="{handler}",status_class="5xx"}} (\S+)$',
        text,
        re.MULTILINE,
    )
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("where", WHERE)
def test_a_crash_is_a_500_with_its_id_a_counter_and_a_line(site, monkeypatch, caplog, where):
    module, name, method, path, handler = WHERE[where]
    before = n_failed(site, handler)
    headers = {"authorization": f"Bearer {ONE}", "x-request-id": f"crash-{where}"}
    body = {"args": {}} if handler == "tools" else {"sql": "SELECT 1"} if handler == "sql" else None
    with monkeypatch.context() as broken, caplog.at_level(logging.INFO):
        broken.setattr(module, name, fail)
        answer = local_http.request(method, f"{site.url}{path}", json=body, headers=headers)
        broken.undo()
        assert ask(site, "fleet.cluster.summary", token=TWO).status_code == 200
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert answer.headers["x-request-id"] == f"crash-{where}"
    assert DEFECT not in answer.text
    audit = [r.fields for r in caplog.records if r.name == "ingero.echo.audit"]
    (line,) = (one for one in audit if one["request_id"] == f"crash-{where}")
    assert (line["status"], line["path"], line["bearer_key_name"]) == (500, path, "team-one")
    assert any(r.exc_info and DEFECT in str(r.exc_info[1]) for r in caplog.records)
    assert n_failed(site, handler) == before + 1

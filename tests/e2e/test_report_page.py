"""The page of the week in a real browser, on an Echo that was told of a slow rank, an action, and other clusters."""

import datetime as dt
import os
import struct
from pathlib import Path

import httpx
import pytest
from tests.detect.acted_jobs import NS, JobPlan
from tests.echo.service.conftest import ALL, ONE, bearers, push, result
from tests.echo.service.told_jobs import BEGAN_NS, act, tell
from tests.support import local_http
from tests.support.browser import LOST, lose_first, open_browser, read_statuses, watch_faults
from tests.support.echo import RunningEcho

from ingero.otlp.names import Signal
from ingero.wire.costs import CHARGED, UNATTRIBUTED, CostRecord, build_cost_records

pytestmark = [pytest.mark.browser, pytest.mark.slow]
GUIDE_PICTURE = Path(__file__).parents[2] / "docs/guides/echo-report.png"
WINDOW = {"width": 1280, "height": 1330}
BEGAN = dt.datetime.fromtimestamp(BEGAN_NS / NS, dt.UTC)
MONDAY = (BEGAN - dt.timedelta(days=BEGAN.weekday())).replace(
    hour=0, minute=0, second=0, microsecond=0
)
PLAN = JobPlan(n_ranks=4, n_steps=500, acted_s=150.0)


def cost(gpu_seconds, node="", amount=None, currency="", **more):
    kind = CHARGED if node else UNATTRIBUTED
    return CostRecord(
        gpu_seconds=gpu_seconds,
        attributed=kind,
        node_id=node,
        amount=amount,
        currency=currency,
        **more,
    )


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    with RunningEcho(tmp_path_factory.mktemp("echo") / "echo.db", bearers()) as running:
        tell(running, PLAN)
        act(running, 30.0, "", action="a9", cluster="c2")
        before_ns = int((MONDAY - dt.timedelta(days=2)).timestamp()) * NS
        for cluster, costs, at_ns in (
            ("c1", [cost(500.0, "n0", 5.0, "USD", rank=0)], before_ns),
            ("c2", [cost(7200.0, "h7", 9.5, "EUR", rank=7), cost(50.0)], BEGAN_NS),
            ("c2", [cost(3600.0, "<img src=x>", 4.0, "EUR", rank=1)], before_ns),
        ):
            assert (
                push(
                    running, build_cost_records(cluster, costs, at_ns), signal=Signal.LOGS
                ).status_code
                == 200
            )
        yield running


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def visit(browser, echo):
    """Open the page as a bearer; anything that goes wrong in the browser, and any request to elsewhere, fails the test."""
    faults, contexts = [], []

    def open_page(link=f"#week={MONDAY:%Y-%m-%d}", scheme="light", token=ALL, n_lost=0):
        context = browser.new_context(viewport=WINDOW, color_scheme=scheme)
        context.set_default_timeout(15_000)
        contexts.append(context)
        page = context.new_page()
        watch_faults(page, echo.url, faults, ("401", LOST) if n_lost else ("401",))
        if n_lost:
            lose_first(page, "**/api/v2/**", n_lost)
        page.goto(f"{echo.url}/report{link}")
        page.wait_for_selector("#access:not([hidden])")
        assert page.is_hidden("#main")
        assert page.evaluate("document.activeElement.id") == "token"
        page.keyboard.type(token)
        page.keyboard.press("Enter")
        page.wait_for_selector("#main:not([hidden])")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def rows(page, part):
    return [row.inner_text().split("\t") for row in page.query_selector_all(f"#{part} tbody tr")]


def test_the_week_its_clusters_actions_nodes_and_jobs_are_those_that_echo_tells(visit, echo):
    page = visit()
    asked = {"time_window": "1d", "until": "latest"}
    totals = [
        one for one in result(echo, "fleet.cluster.cost_by_week", {"time_window": "7d"})["totals"]
        if dt.datetime.fromisoformat(one["week"]) == MONDAY
    ]  # fmt: skip
    usd = sum(
        one["charged_amount"] + (one["unattributed_amount"] or 0)
        for one in totals
        if one["currency"] == "USD"
    )
    summary = page.inner_text("#summary")
    assert f"{usd:.2f} USD" in summary
    assert "9.50 EUR" in summary
    lines = {row[0]: row[1:] for row in rows(page, "cost")}
    assert lines["Lost to waiting"][1] == "1.14 GPU-hours; 5.00 USD, 4.00 EUR"
    assert lines["Lost to waiting"][2].startswith("+")
    assert lines["Without a price"][:2] == ["50.0 GPU-seconds", "none"]
    first, second = rows(page, "clusters")
    assert (first[0], first[1], first[2], first[4]) == (
        "c2",
        "2.01 GPU-hours",
        "9.50 EUR",
        "+101 %",
    )
    assert second[0] == "c1"
    (saving,) = result(echo, "fleet.cluster.savings", asked | {"cluster_id": "c1"})["savings"]
    told, untold = rows(page, "actions")
    assert told[0] == "n2, rank 2"
    assert (told[1], told[3]) == ("c1", "slurm, undone")
    assert 0 < saving["saved_gpu_seconds"] < 360
    worth, error, usd = (
        saving[name]
        for name in ("saved_gpu_seconds", "saved_standard_error_gpu_seconds", "saved_amount")
    )
    assert told[7] == f"{worth:.1f} GPU-seconds ± {error:.1f} GPU-seconds; {usd:.2f} USD"
    assert untold[4:8] == ["not known"] * 4
    why = "Not known of n2 in c2: the action's record does not say which rank"
    assert page.inner_text("#actions .reasons").startswith(why)
    said = page.inner_text("#actions .note")
    assert "would have taken as long" in said
    assert "steps done twice" in said
    nodes = rows(page, "nodes")
    assert nodes[0][:3] == ["h7, rank 7", "c2", "not known"]
    assert nodes[1][:4] == ["n2, rank 2", "c1", "4711", "NVIDIA L4, aws"]
    assert nodes[1][6:] == ["new", "1"]  # the week before is known of its cluster
    assert [row[0] for row in rows(page, "jobs")] == ["not known", "4711"]


def test_a_bearer_sees_its_own_clusters_and_a_wrong_one_nothing(visit):
    page = visit(token=ONE)
    assert page.is_hidden("#clusters-section"), "one cluster has nothing to be compared with"
    assert page.inner_text("#cluster").split("\n") == ["all that this token may read", "c1"]
    assert {row[1] for row in rows(page, "nodes")} == {"c1"}
    page.evaluate("sessionStorage.setItem('token', 'x'.repeat(40))")
    page.reload()
    page.wait_for_selector("#status >> text=Echo does not know this token.")
    assert page.is_hidden("#main")


def test_what_happened_to_a_node_is_reached_by_keyboard_and_linked_to(visit):
    page = visit()
    page.focus("#nodes tbody tr:nth-child(2) button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#story tbody tr")
    assert page.inner_text("#story-title") == "What happened to n2"
    assert page.evaluate("document.activeElement.id") == "story-title"
    whats = [row[1] for row in rows(page, "story")]
    assert whats[0] == "action a1: undone"
    assert any("culprit" in what for what in whats)
    assert f"week={MONDAY:%Y-%m-%d}&cluster=c1&node=n2" in page.url
    page.select_option("#week", f"{MONDAY - dt.timedelta(weeks=1):%Y-%m-%d}")
    page.wait_for_selector("#nodes >> text=n0, rank 0")
    assert rows(page, "nodes")[0][6] == "not known", "nothing is known of the week before"
    assert rows(page, "cost")[0][2:] == ["not known", "not known"]
    page.select_option("#cluster", "c2")
    page.wait_for_selector("#nodes >> text=<img src=x>, rank 1")  # a name is text, whatever it is
    assert page.is_hidden("#story-section")
    page.select_option("#week", f"{MONDAY - dt.timedelta(weeks=3):%Y-%m-%d}")
    page.wait_for_selector("#cost >> text=No cost of waiting is known")
    assert "took effect" in page.inner_text("#actions")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_of_accessibility_is_broken(visit, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = visit(f"#week={MONDAY:%Y-%m-%d}&cluster=c1&node=n2", scheme)
    page.wait_for_selector("#story tbody tr")
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []


def test_paper_has_the_report_and_no_controls(visit):
    page = visit()
    page.emulate_media(media="print")
    assert page.is_hidden(".controls")
    assert page.is_visible("#actions table")
    assert page.pdf().startswith(b"%PDF")


def test_a_request_that_was_lost_is_sent_again_and_nobody_reads_of_it(visit):
    assert read_statuses(visit(n_lost=1)) == []


def test_the_guides_picture_is_of_this_page(visit, tmp_path):
    page = visit(f"#week={MONDAY:%Y-%m-%d}")
    wanted = GUIDE_PICTURE if os.environ.get("INGERO_WRITE_PICTURES") else tmp_path / "report.png"
    page.screenshot(path=wanted)
    taken, shown = wanted.read_bytes(), GUIDE_PICTURE.read_bytes()
    assert struct.unpack(">II", taken[16:24]) == struct.unpack(">II", shown[16:24])
    assert len(shown) > 20_000


def test_the_page_is_open_and_what_it_shows_is_not(echo):
    page = local_http.get(f"{echo.url}/report")
    assert page.text.startswith("<!doctype html>")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert (
        httpx
        .get(f"{echo.url}/report/report.js")
        .headers["content-type"]
        .startswith("text/javascript")
    )
    assert local_http.get(f"{echo.url}/report/other.js").status_code == 401
    assert (
        local_http.get(
            f"{echo.url}/report/other.js", headers={"authorization": f"Bearer {ALL}"}
        ).status_code
        == 404
    )
    assert local_http.post(f"{echo.url}/report").status_code == 405
    asked = local_http.post(
        f"{echo.url}/api/v2/tools/fleet.cluster.cost_by_week", json={"args": {}}
    )
    assert asked.status_code == 401

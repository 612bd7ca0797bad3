"""Fleet's live page in a real browser, on a real Fleet that ranks push to: what is seen, linked to, and reached by keyboard."""

import os
import re
import struct
from pathlib import Path

import pytest
from tests.deploy.site import Site, site_config
from tests.e2e.agents import Agents
from tests.support import local_http
from tests.support.browser import LOST, lose_first, open_browser, read_statuses, stall, watch_faults

from ingero.testing.fleet import run_fleet
from ingero.testing.waiting import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.slow]
GUIDE_PICTURE = Path(__file__).parents[2] / "docs/guides/fleet-live.png"
CULPRIT = "rank 5 on node5"
WINDOW = {"width": 1180, "height": 1020}
NOBODY = 9  # the discard port: nothing listens there


@pytest.fixture(scope="module")
def fleet():
    config = site_config(NOBODY)
    config["processors"]["ingero"]["ttl_multiplier"] = (
        100  # nodes push once, and are looked at for minutes
    )
    config["extensions"]["ingero_threshold"] |= {
        "live_interval": "100ms",
        "dashboard_url": "https://{node_id}.example:8443/",
    }
    with run_fleet(config) as running:
        agents = Agents(running)
        site = Site(agents, {})
        site.admin = f"http://{running.addresses['extensions.ingero_threshold admin']}"

        def judged():
            site.push()
            query = {"cluster_id": "job"}
            answer = local_http.get(f"{site.admin}/api/v1/admin/findings", params=query)
            return answer.status_code == 200 and (answer.json()["findings"] or [{}])[0].get(
                "amount"
            )

        wait_until(judged)
        yield site
        agents.client.close()


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def visit(browser, fleet):
    """Open the page; anything that goes wrong in the browser, and any request to elsewhere, fails the test."""
    faults, contexts = [], []

    def open_page(link="", scheme="light", n_lost=0):
        context = browser.new_context(viewport=WINDOW, color_scheme=scheme)
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        watch_faults(page, fleet.admin, faults, (LOST,) if n_lost else ())
        lost = lose_first(page, "**/api/v1/admin/*", n_lost) if n_lost else []
        page.goto(f"{fleet.admin}/{link}")
        page.wait_for_selector("#findings tbody tr")
        page.wait_for_selector("#rows:not(:empty)")
        if n_lost:
            assert len(lost) > n_lost
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def pixel(page, row, n_rows=8):
    """Colour of a row of the map at this moment."""
    return page.evaluate(
        "([row, n]) => { const c = document.getElementById('canvas'); const y = Math.floor((row + .5) * c.height / n);"
        " return [...c.getContext('2d').getImageData(c.width - 1, y, 1, 1).data]; }",
        [row, n_rows],
    )


def test_the_culprit_stands_out_with_its_cause_its_cost_and_its_nodes_dashboard(visit):
    page = visit("#measure=slowdown")
    row = page.inner_text("#findings tbody tr")
    assert CULPRIT in row
    assert "culprit" in row
    assert "own time 1.40× that of its 7 peers" in row
    assert re.search(r"\t7\t\d+\.\d\d GPU-hours", row)  # seven others waited
    assert "USD" in row
    node = page.query_selector("#findings tbody a")
    assert node.get_attribute("href") == "https://node5.example:8443/"
    others = [pixel(page, row) for row in range(8) if row != 5]
    assert all(red < 60 < blue for red, _, blue, _ in others)  # blue: as fast as the peers
    red, green, blue, _ = pixel(page, 5)
    assert red > 200 > green > blue  # orange: 1.4 times


def test_thresholds_exporters_and_hangs_are_shown(visit):
    page = visit()
    clusters = page.inner_text("#clusters tbody tr").split("\t")
    assert clusters[0] == "job"
    assert float(clusters[1]) > 0.5
    assert clusters[4:] == ["yes", "8", "1"]
    page.wait_for_selector("#exporters >> text=/has taken nothing for .* refused/")
    assert "otlphttp" in page.inner_text("#exporters tbody tr")
    assert page.inner_text("#hang") == "No job stands still."


def test_ranks_that_wait_for_each_other_are_a_row_and_no_job_that_moves(visit):
    page = visit()
    answer = {"roots": [], "deadlocks": [[0, 1], list(range(99))], "standing_s": 41.6}
    page.route("**/api/v1/admin/hang*", lambda route: route.fulfill(json=answer))
    page.wait_for_selector("#hang caption >> text=/^Standing for 42 s; deadlocked/")
    rows = [row.split("\t") for row in page.locator("#hang tbody tr").all_inner_texts()]
    assert rows[0] == ["ranks 0, 1 wait for each other", "2"]
    assert rows[1][0].endswith(", 14, 15 and others wait for each other")
    assert rows[1][1] == "99"


def test_verdicts_of_a_judge_that_does_not_keep_up_are_called_old(visit):
    page = visit()
    assert "old" not in page.inner_text("#findings")
    answer = {"total": 0, "findings": [], "age_s": 41.6}
    page.route("**/api/v1/admin/findings*", lambda route: route.fulfill(json=answer))
    page.wait_for_selector("#findings >> text=Verdicts are 42 s old.")
    assert "Nothing is said against any rank." in page.inner_text("#findings")


def test_a_link_from_an_alert_opens_what_it_names_and_the_address_follows_the_mark(visit):
    page = visit("#cluster=job&measure=score&row=node5")
    page.wait_for_selector("#picked >> text=node5, now: 0.40")
    assert page.input_value("#measure") == "score"
    page.focus("#heat")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#picked >> text=/node4, at .* UTC: 0.90/")
    assert "row=node4" in page.url
    assert "at=1" in page.url
    page.goto(page.url.replace("row=node4", "row=node5").replace("at=", "at=0#"))
    page.wait_for_selector("#picked >> text=/node5/")


def test_the_keyboard_alone_reaches_everything(visit):
    page = visit("#measure=score")
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate("document.activeElement.id || document.activeElement.dataset.key")
        )
    assert [one for one in seen if one in {"cluster", "measure", "follow", "heat", CULPRIT}] == [
        *("cluster", "measure", "follow", "heat", CULPRIT),
    ]
    page.focus(f"[data-key='{CULPRIT}']")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#picked >> text={CULPRIT}, now: 1.40 times its peers")
    assert page.evaluate("document.activeElement.id") == "heat"
    page.keyboard.press("0")
    assert "8 of 8 ranks" in page.inner_text("#rows")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_of_accessibility_is_broken(visit, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = visit(f"#cluster=job&measure=slowdown&row={CULPRIT}", scheme)
    page.wait_for_selector(f"#picked >> text={CULPRIT}")
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []


def test_the_guides_picture_is_of_this_page(visit, tmp_path):
    page = visit(f"#cluster=job&measure=slowdown&row={CULPRIT}")
    page.wait_for_selector(f"#picked >> text={CULPRIT}")
    wanted = GUIDE_PICTURE if os.environ.get("INGERO_WRITE_PICTURES") else tmp_path / "live.png"
    page.screenshot(path=wanted)
    taken, shown = wanted.read_bytes(), GUIDE_PICTURE.read_bytes()
    assert struct.unpack(">II", taken[16:24]) == struct.unpack(">II", shown[16:24])
    assert len(shown) > 20_000


def test_a_request_that_was_lost_is_sent_again_and_nobody_reads_of_it(visit):
    assert read_statuses(visit("#measure=score", n_lost=1)) == []


def test_a_page_that_was_opened_before_fleet_answered_comes_to_life(visit):
    page = visit("#measure=score", n_lost=2)
    assert set(read_statuses(page)) == {"Fleet does not answer. Is it still running?"}
    page.wait_for_selector("#status:empty", state="attached")


def test_a_connection_that_went_dead_is_noticed_and_left(visit):
    page = visit("#measure=score")
    stall(page, re.compile("/live/levels|/api/v1/admin/"), 10_000)
    silent = "text=Fleet does not answer. Is it still running?"
    page.wait_for_selector(f"#status >> {silent}", timeout=10_000)
    page.unroute_all(behavior="ignoreErrors")
    with page.expect_response("**/live/levels*"):
        page.wait_for_selector("#status:empty", state="attached")


def test_what_goes_wrong_with_the_tables_stands_while_the_map_goes_on(visit):
    page = visit("#measure=score")
    page.route("**/admin/exporters*", lambda route: route.fulfill(body="broken"))
    page.wait_for_selector("#status >> text=not valid JSON")
    page.evaluate(
        "window.statuses = []; const status = document.getElementById('status');"
        " new MutationObserver(() => statuses.push(status.textContent)).observe(status, { childList: true })"
    )
    for _ in range(4):
        with page.expect_response("**/live/levels*"):
            pass
    with page.expect_response("**/admin/exporters*"):
        pass
    assert read_statuses(page) == []
    page.unroute_all(behavior="ignoreErrors")
    page.wait_for_selector("#status:empty", state="attached")


def test_no_answer_about_another_cluster_is_shown_under_the_chosen_one(visit):
    page, held = visit("#cluster=job"), []

    def hold(route):
        held.append(route)

    as_job = re.compile("(admin/hang|live/levels).*cluster_id=other")
    page.route("**/admin/findings?cluster_id=job*", hold)
    nobody = {"total": 0, "findings": [], "age_s": 0}
    other = "**/admin/findings?cluster_id=other*"
    page.route(other, lambda route: route.fulfill(json=nobody))
    job = "cluster_id=job"
    page.route(
        as_job,
        lambda route: route.continue_(url=re.sub("cluster_id=other", job, route.request.url)),
    )
    with page.expect_request("**/admin/findings?cluster_id=job*"):
        pass
    page.evaluate("location.hash = '#cluster=other'")
    page.wait_for_selector("#findings >> text=Nothing is said")
    page.uncheck("#follow")
    held[0].continue_()
    page.wait_for_timeout(500)
    assert "Nothing is said" in page.inner_text("#findings")


def test_nothing_is_marked_where_there_is_no_rank(visit):
    page = visit("#cluster=job")
    page.route("**/live/levels*", lambda _route: None)
    page.evaluate("location.hash = '#cluster=job&measure=score'")
    page.click("#canvas")
    assert page.inner_text("#picked") == "Nothing marked."


def test_a_page_that_is_looked_at_again_asks_at_once(visit):
    page = visit("#measure=score")
    page.evaluate("window.setTimeout = () => 0")
    page.wait_for_timeout(2500)  # no timer of the page is left
    with page.expect_request("**/live/levels*"), page.expect_request("**/admin/clusters*"):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_programs_get_json_where_browsers_get_the_page(fleet):
    index = local_http.get(f"{fleet.admin}/")
    assert "/api/v1/admin/findings" in index.json()["pages"]
    page = local_http.get(f"{fleet.admin}/", headers={"accept": "text/html,*/*"})
    assert page.text.startswith("<!doctype html>")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path, status in {
        "cluster_id=job&measure=score": 200,
        "cluster_id=job&measure=score&after=x": 400,
        "measure=score": 400,
        "cluster_id=job&measure=other": 404,
        "cluster_id=other&measure=score": 404,
    }.items():
        assert local_http.get(f"{fleet.admin}/live/levels?{path}").status_code == status, path
    assert local_http.get(f"{fleet.admin}/live/other.js").status_code == 404
    named = local_http.get(f"{fleet.admin}/live", headers={"host": "evil.example"})
    assert named.status_code == 403

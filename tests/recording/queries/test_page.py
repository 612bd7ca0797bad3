"""The page in a real browser: what a person sees, with the mouse, with the keyboard alone and with a screen reader."""

import re
import sqlite3
from contextlib import closing

import anyio.from_thread
import pytest
from tests.support.browser import LOST, lose_first, open_browser, read_statuses, stall, watch_faults

from ingero.config import Endpoint
from ingero.model.events import Source
from ingero.model.recording import Unprobed
from ingero.recording.queries.explain import explain_file
from ingero.recording.queries.https_server import ListenSettings, open_server
from ingero.recording.queries.window import Wanted
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.store.writer import RecordingWriter

pytestmark = pytest.mark.browser
VIEWS = ("incidents", "timeline", "stacks", "ops", "memory", "collectives", "machine")


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def serve():
    """Serve a recording from another thread; gives the address."""
    with anyio.from_thread.start_blocking_portal() as portal:
        held = []

        def start(path, **settings):
            chosen = ListenSettings(
                Endpoint("127.0.0.1", 0), **{"has_tls": False, "has_mcp": False, **settings}
            )
            server = portal.wrap_async_context_manager(open_server(path, chosen))
            held.append(server)
            scheme = "https" if chosen.has_tls else "http"
            return f"{scheme}://{server.__enter__()}/"

        yield start
        for server in held:
            server.__exit__(None, None, None)


@pytest.fixture
def visit(browser, serve):
    """Open the page of a recording; anything that goes wrong in the browser fails the test."""
    faults, contexts = [], []

    def open_page(path, *, scheme="light", n_lost=0, **settings):
        address = serve(path, **settings)
        context = browser.new_context(ignore_https_errors=True, color_scheme=scheme)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        watch_faults(page, address, faults, ("status of", LOST) if n_lost else ("status of",))
        if n_lost:
            lose_first(page, "**/api/v1/*", n_lost)
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def show(page, view):
    page.click(f"#tab-{view}")
    page.wait_for_selector(f"#{view}[aria-busy=false]")
    return page.inner_text(f"#{view}")


@pytest.fixture
def cluster(tmp_path):
    """Four ranks with one late, a job that blocks on reads, stacks, allocations and load."""
    from benchmarks.dashboard import write_recording

    write_recording(tmp_path / "cluster.db", 4_000)
    return tmp_path / "cluster.db"


def lose(path):
    """Take rows and a library from a recording, as a full disk and a short-lived file do."""
    with RecordingWriter(path, "node-0") as writer:
        gone = Unprobed(6001, "/usr/lib/libnccl.so.2", "gone before it was attached")
        writer.put_unprobed([gone], [], START_NS)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO unwritten (bucket, node, source, op, cause, count) VALUES (0, 'node-0', 1, 3, ?, 1200)",
            ("database or disk is full",),
        )


def test_incident_is_shown_with_its_cause_share_evidence_and_next_step(visit, data_dir):
    page = visit(data_dir / "agent_dbs/pytorch-dataloader-starvation.db")
    text = show(page, "incidents")
    assert "HIGH" in text
    assert "Input starvation" in text
    assert re.search(r"\d+(\.\d)? % computing on the host", text)
    assert "DataLoader workers" in text
    assert page.get_attribute("#incidents article.incident meter", "aria-label").startswith("share")
    assert "3,807 events" in page.inner_text("#summary")


def test_no_incident_says_what_was_looked_for_and_what_could_not_be_judged(visit, data_dir):
    page = visit(data_dir / "agent_dbs/sample-gpu-node-02.db")
    text = show(page, "incidents")
    told = explain_file(data_dir / "agent_dbs/sample-gpu-node-02.db", Wanted())
    assert f"No incident: {len(told.looked.judged)} kinds of problem looked for" in text
    assert f"{len(told.looked.unknown)} could not be judged, see below" in text
    assert page.locator("#incidents .healthy").count() == 0
    cards = page.locator("#incidents article.unknown")
    assert cards.count() == len(told.unknown) > 0
    for shown, one in zip(cards.all_inner_texts(), told.unknown, strict=True):
        assert one.missing in shown
        assert one.how in shown
        assert str(one.pid) in shown
    looked = page.inner_text("#incidents article.looked")
    for rule in (*told.looked.judged, *told.looked.unknown, *told.looked.nothing_recorded):
        assert rule.replace("_", " ") in looked


def test_healthy_recording_says_so(visit, tmp_path):
    built = RecordingBuilder().name(7, "train")
    for i in range(20):
        built.call((Source.CUDA, 3), i * 10**6, 10**4, pid=7)
    built.write(tmp_path / "healthy.db")
    page = visit(tmp_path / "healthy.db")
    assert "No incident: " in show(page, "incidents")
    assert page.locator("#incidents article.unknown").count() == 0
    assert page.locator("#incidents .healthy").count() == 1


def test_what_the_recording_lacks_stands_beside_every_view(visit, cluster):
    lose(cluster)
    page = visit(cluster)
    for view in VIEWS:
        show(page, view)
        beside = page.inner_text("#missing")
        assert "1200 rows were not stored: database or disk is full" in beside
        assert "/usr/lib/libnccl.so.2 of pid 6001 (gone before it was attached)" in beside
    assert "1200 rows were not stored" in show(page, "incidents")


def test_nothing_is_missing_from_a_whole_recording(visit, cluster):
    page = visit(cluster)
    show(page, "incidents")
    assert page.is_hidden("#missing")


def test_every_view_shows_its_facts(visit, cluster):
    page = visit(cluster)
    texts = {view: show(page, view) for view in VIEWS}
    assert "Rank 2 is late" in texts["incidents"]
    assert "rank2 (6002)" in texts["timeline"]
    assert "linear (layers.py:99)" in texts["stacks"]
    assert "ncclAllReduce" in texts["ops"]
    assert "held at the end" in texts["memory"]
    assert "120 of 120" in texts["collectives"]
    assert "CPU:" in texts["machine"]
    assert page.locator("#timeline path").count() + page.locator("#timeline rect").count() > 5


def test_the_page_links_to_fleets_live_page_where_there_is_one(visit, cluster):
    page = visit(cluster, fleet_url="https://fleet.example:8081/")
    page.wait_for_selector("#fleet:not([hidden])")
    assert page.get_attribute("#fleet", "href") == "https://fleet.example:8081/"
    without = visit(cluster)
    without.wait_for_selector("#incidents[aria-busy=false]")
    assert without.is_hidden("#fleet")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_breaks_a_rule_of_accessibility(visit, cluster, scheme):
    from axe_playwright_python.sync_playwright import Axe

    lose(cluster)
    page = visit(cluster, scheme=scheme)
    for view in VIEWS:
        show(page, view)
        found = Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == [], view


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_could_not_be_judged_breaks_no_rule_of_accessibility(visit, data_dir, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = visit(data_dir / "agent_dbs/sample-gpu-node-02.db", scheme=scheme)
    assert "UNKNOWN" in show(page, "incidents")
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []


def test_a_server_that_is_silent_for_long_is_said_to_be(visit, cluster):
    page = visit(cluster)
    show(page, "incidents")
    stall(page, "**/api/v1/*", 120_000)
    page.wait_for_selector("#status >> text=/^The server does not answer/", timeout=10_000)
    page.unroute_all(behavior="ignoreErrors")
    page.wait_for_selector("#status:empty", state="attached")


def test_a_request_that_was_lost_is_sent_again_and_nobody_reads_of_it(visit, cluster):
    page = visit(cluster, n_lost=1)
    show(page, "ops")
    assert read_statuses(page) == []


def test_keyboard_alone_reaches_everything(visit, cluster):
    page = visit(cluster)
    page.wait_for_selector("#incidents[aria-busy=false]")
    focused = "document.activeElement.id || document.activeElement.dataset.key"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for wanted in ("part", "live", "tab-incidents"):
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == wanted
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "tab-timeline"
    page.wait_for_selector("#timeline[aria-busy=false] [data-key=timeline]")
    page.focus("[data-key=timeline]")
    page.keyboard.press("+")
    page.wait_for_selector("text=following pauses while zoomed")
    assert page.evaluate(focused) == "timeline"
    page.keyboard.press("0")
    page.wait_for_selector("text=following pauses while zoomed", state="detached")


def test_flame_is_walked_and_zoomed_with_the_keyboard(visit, cluster):
    page = visit(cluster)
    show(page, "stacks")
    page.focus(".flame [tabindex='0']")
    for key in ("ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    name = page.evaluate("document.activeElement.textContent")
    assert name in page.inner_text("#frame-details")
    before = page.locator(".frame").count()
    page.keyboard.press("Enter")
    page.wait_for_selector(f".frame[aria-level='1']:text-is('{name}')")
    assert page.locator(".frame").count() < before


def test_incident_leads_to_its_span_of_the_timeline(visit, cluster):
    page = visit(cluster)
    show(page, "incidents")
    page.click("text=Show on the timeline >> nth=0")
    page.wait_for_selector("#timeline[aria-busy=false] [data-key=timeline]")
    assert page.get_attribute("#tab-timeline", "aria-selected") == "true"


def test_token_is_asked_for_once_kept_out_of_the_address_and_a_wrong_one_is_told(visit, data_dir):
    page = visit(data_dir / "agent_dbs/sample-gpu-node-02.db", token="s3cret")
    page.wait_for_selector("#access:not([hidden])")
    assert page.evaluate("document.activeElement.id") == "token"
    assert page.inner_text("#incidents") == ""
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=does not know this token")
    page.fill("#token", "s3cret")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=No incident: ")
    assert page.is_hidden("#access")
    page.reload()
    page.wait_for_selector("text=No incident: ")
    assert "s3cret" not in page.url


def test_page_follows_a_recording_that_grows_and_keeps_the_focus(visit, tmp_path):
    path = tmp_path / "live.db"
    built = RecordingBuilder()
    built.call((Source.CUDA, 3), 0, 10, pid=7)
    built.write(path)
    page = visit(path)
    show(page, "ops")
    page.fill("#op-filter", "cudaLaunch")
    with RecordingWriter(path, "node-0") as writer:
        writer.put_events(built.events())
        writer.flush()
        page.wait_for_selector("#summary:has-text('2 events')")
        page.wait_for_selector("#ops td:has-text('2') >> nth=0")
    assert page.evaluate("document.activeElement.id") == "op-filter"
    assert page.input_value("#op-filter") == "cudaLaunch"


def test_recording_that_is_not_there_yet_is_told_and_then_shown(visit, tmp_path):
    page = visit(tmp_path / "later.db")
    page.wait_for_selector("#status:has-text('no such file')")
    built = RecordingBuilder()
    built.call((Source.CUDA, 3), 0, 10, pid=7)
    built.write(tmp_path / "later.db")
    page.wait_for_selector("text=No incident: ")
    assert page.inner_text("#status") == ""


def test_page_works_over_its_own_certificate(visit, data_dir):
    page = visit(data_dir / "agent_dbs/sample-gpu-node-02.db", has_tls=True)
    page.wait_for_selector("text=No incident: ")
    assert page.url.startswith("https://")


def test_names_of_traced_programs_are_text_and_never_markup(visit, tmp_path):
    built = RecordingBuilder().name(7, "<img src=x onerror=alert(1)>")
    for i in range(20):
        built.call((Source.CUDA, 3), i * 1000, 10, pid=7)
    built.write(tmp_path / "r.db")
    page = visit(tmp_path / "r.db")
    assert "<img src=x" in show(page, "ops")
    assert page.locator("img").count() == 0

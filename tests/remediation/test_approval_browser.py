"""A proposal's page in a real browser: by keyboard, without scripts, on a phone, and by the rules of accessibility."""

import pytest
from tests.remediation.test_approval_link import Asked
from tests.support.browser import open_browser

from ingero.config import Endpoint
from ingero.serving.threaded import serve_threaded

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PHONE = {"width": 360, "height": 640}


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def visit(browser, tmp_path):
    """A proposal, and how to open its link."""
    contexts, waiting = [], []

    def respond(request):
        return waiting[0].page.respond(request)

    with serve_threaded(Endpoint("127.0.0.1", 0), respond, "listen") as bound:
        asked = Asked(tmp_path, base=f"http://{bound}")
        waiting.append(asked)

        def open_page(**how):
            context = browser.new_context(viewport=PHONE, **how)
            context.set_default_timeout(30_000)
            contexts.append(context)
            page = context.new_page()
            page.goto(asked.links["ana"])
            return page

        yield asked, open_page
        for context in contexts:
            context.close()


def test_a_person_with_a_keyboard_and_without_scripts_approves(visit):
    asked, open_page = visit
    page = open_page(java_script_enabled=False)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1 >> text=n2: approved")
    assert asked.site.states() == ["approved"]
    page.reload()  # which asks for the page, and sends no answer again
    assert asked.notes() == ["", "a person agreed by the link of ana"]


def test_the_second_button_rejects(visit):
    asked, open_page = visit
    open_page().get_by_role("button", name="Reject: leave n2 alone").click()
    assert asked.site.states() == ["rejected"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_of_accessibility_is_broken_and_a_phone_scrolls_in_one_direction(visit, scheme):
    from axe_playwright_python.sync_playwright import Axe

    asked, open_page = visit
    page = open_page(color_scheme=scheme)
    page.get_by_text("What the policy compared").click()
    for wanted in ("Take n2 out of service?", "n2: rejected"):
        page.wait_for_selector(f"h1 >> text={wanted}")
        found = Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        asked.post(asked.links["ana"], b"answer=reject")
        page.reload()

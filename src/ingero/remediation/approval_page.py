"""The page behind a proposal's link.

Looking changes nothing, as scanners of mail and previews of chats open links too: only a POST answers. There are no
cookies, so nobody's browser has rights that another site's page could use; a POST that a browser says comes from
another site's page is refused all the same, and no page may frame this one. A link that is not ours shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from html import escape
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from ingero.errors import RetryableError, StoreError
from ingero.remediation.approval_html import (
    STYLE_HASH,
    describe_effect,
    write_answered,
    write_page,
    write_proposal,
)
from ingero.remediation.config import RemediatorConfig
from ingero.remediation.journal import Journal
from ingero.remediation.links import PAGE, LinkSigner, Token, parse_token
from ingero.remediation.records import ActionRecord, ActionState, Moment
from ingero.remediation.urls import find_origin
from ingero.serving.threaded import HttpRequest, HttpResponse
from ingero.units import NS_PER_S

_HEADERS: Final = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{STYLE_HASH}'; form-action 'self';"
    " base-uri 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # `no-referrer` would also hide the origin of our own form
    "Cache-Control": "no-store",
    "X-Robots-Tag": "noindex, nofollow",
}
_ANSWERS: Final = {"approve": ActionState.APPROVED, "reject": ActionState.REJECTED}
_SAYS: Final = {ActionState.APPROVED: "agreed", ActionState.REJECTED: "refused"}
_NO_LINK: Final = "This link is not valid"
_NO_LINK_SAYS: Final = (
    "It may have been cut off, or its key was replaced."
    " <code>ingero-remediator journal</code> shows what waits."
)


class ApprovalPage:
    """Shows proposals to those who have their links, and takes answers. Asked in several threads.

    Args:
        config: The policy.
        signer: Checks links.
        read_now: The time.
    """

    def __init__(
        self, config: RemediatorConfig, signer: LinkSigner, read_now: Callable[[], Moment]
    ) -> None:
        self._journal = Path(config.journal.file)
        self._is_audited = config.audit is not None
        self._action = config.action
        self._signer = signer
        self._read_now = read_now

    def respond(self, request: HttpRequest) -> HttpResponse:
        """Show, or take an answer."""
        try:
            if request.method == "POST":
                return self._answer(request)
            return self._show(request.path)
        except StoreError as error:
            text = f"{escape(error.message)}; try again later."
            return _refuse(HTTPStatus.SERVICE_UNAVAILABLE, "The journal does not answer", text)

    def _show(self, path: str) -> HttpResponse:
        with Journal(self._journal, read_only=True) as journal:
            found = self._find(path, journal)
            if found is None:
                return _refuse(HTTPStatus.NOT_FOUND, _NO_LINK, _NO_LINK_SAYS)
            token, record = found
            changes = journal.changes(record.action_id)
        if record.state is not ActionState.PROPOSED:
            return _respond(HTTPStatus.OK, write_answered(record, changes))
        if self._is_over(token):
            return _refuse(HTTPStatus.GONE, "This link is over", "Nobody answered in time.")
        effect, until_ns = describe_effect(self._action, record.target), token.until_s * NS_PER_S
        return _respond(HTTPStatus.OK, write_proposal(record, effect, token.label, until_ns))

    def _answer(self, request: HttpRequest) -> HttpResponse:
        with Journal(self._journal, is_audited=self._is_audited) as journal:
            found = self._find(request.path, journal)
            if found is None:
                return _refuse(HTTPStatus.NOT_FOUND, _NO_LINK, _NO_LINK_SAYS)
            token, record = found
            here = self._signer.build_url(token)
            if not _is_own_form(request.headers, here):
                text = "Open the link itself and answer there."
                return _refuse(HTTPStatus.FORBIDDEN, "This answer came from another page", text)
            if self._is_over(token):
                return _refuse(HTTPStatus.GONE, "This link is over", "Nobody answered in time.")
            state = _read_answer(request.body)
            if state is None:
                text = "The answer is <code>approve</code> or <code>reject</code>."
                return _refuse(HTTPStatus.BAD_REQUEST, "This is no answer", text)
            if record.state is ActionState.PROPOSED:
                note = f"a person {_SAYS[state]} by the link of {token.label}"
                answered = replace(record, state=state, changed=self._read_now(), note=note)
                with suppress(RetryableError):  # somebody answered meanwhile: the page says what
                    journal.change(record, answered)
        return HttpResponse(HTTPStatus.SEE_OTHER, b"", _HEADERS | {"Location": here})

    def _find(self, path: str, journal: Journal) -> tuple[Token, ActionRecord] | None:
        """The action that a link was signed for."""
        *_, page, text = ("", *urlsplit(path).path.split("/"))
        token = parse_token(text) if page == PAGE else None
        if token is None:
            return None
        record = next((one for one in journal.actions() if one.action_id == token.action_id), None)
        return (token, record) if record and self._signer.is_of(token, record) else None

    def _is_over(self, token: Token) -> bool:
        return self._read_now().wall_ns >= token.until_s * NS_PER_S


def _read_answer(body: bytes) -> ActionState | None:
    given = parse_qs(body.decode("ascii", "replace")).get("answer", [])
    return _ANSWERS.get(given[0]) if len(given) == 1 else None


def _is_own_form(headers: Mapping[str, str], here: str) -> bool:
    """Whether a browser says that a form of this page was sent, or nothing; programs say nothing."""
    origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
    return origin in {None, find_origin(here)} and site in {None, "same-origin"}


def _refuse(status: HTTPStatus, title: str, text: str) -> HttpResponse:
    return _respond(status, write_page(title, f"<p>{text}</p>"))


def _respond(status: HTTPStatus, html: str) -> HttpResponse:
    return HttpResponse(status, html.encode(), _HEADERS)

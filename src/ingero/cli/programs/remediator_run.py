"""``ingero-remediator run``: one poll, or one after another until it is stopped."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Final

import click
import httpx

from ingero import __version__
from ingero.cli.metrics_page import serve_metrics
from ingero.cli.programs.remediator_answers import describe_clauses
from ingero.cli.render import plural
from ingero.cli.signals import catch_stop
from ingero.config import Endpoint
from ingero.errors import RetryableError
from ingero.remediation.approval_page import ApprovalPage
from ingero.remediation.audit import AuditCounts, AuditSender
from ingero.remediation.building import build_actuator, prepare_folder, read_boot, read_moment
from ingero.remediation.config import AuditConfig, RemediatorConfig
from ingero.remediation.fleet_pages import FleetPages
from ingero.remediation.journal import Journal
from ingero.remediation.links import LinkSigner, build_signer
from ingero.remediation.lock import JournalLock
from ingero.remediation.messages import MessageCounts, ProposalSender
from ingero.remediation.orders import find_order
from ingero.remediation.page import RemediatorPage
from ingero.remediation.policy import Ruling
from ingero.remediation.records import HOLDING
from ingero.remediation.remediator import PollResult, Remediator, describe_ruling
from ingero.serving.ready import report_ready
from ingero.serving.threaded import serve_threaded
from ingero.telemetry.clock import SystemClock
from ingero.telemetry.log import set_up_logging
from ingero.units import NS_PER_S, format_duration
from ingero.web_authorities import WebAuthorities

_LOG: Final = logging.getLogger("ingero.remediator")


def poll_once(config: RemediatorConfig, *, as_json: bool) -> int:
    """Print what the policy would do now, and why; nothing is written.

    Raises:
        RetryableError: Fleet does not answer.
    """
    with (
        Journal.copy_in_memory(Path(config.journal.file)) as journal,
        _build(config, journal, is_single_poll=True) as remediator,
    ):
        result = remediator.poll()
    if result.reading.clusters is None:
        raise RetryableError(
            result.reading.problems[0], hint="fleet.admin_url names Fleet's admin endpoint"
        )
    click.echo(_poll_json(config, result) if as_json else _poll_text(config, result))
    return 0


@contextmanager
def _build(
    config: RemediatorConfig, journal: Journal, *, is_single_poll: bool = False
) -> Iterator[Remediator]:
    read_now = functools.partial(read_moment, SystemClock(), read_boot())
    with httpx.Client(
        timeout=config.fleet.timeout / NS_PER_S,
        headers={"User-Agent": f"ingero-remediator/{__version__}"},
        verify=WebAuthorities(),
    ) as client:
        source = FleetPages(client, config.fleet.admin_url, config.fleet.clusters)
        yield Remediator(
            config,
            source,
            build_actuator(config, SystemClock()),
            journal,
            read_now,
            is_single_poll=is_single_poll,
        )


def _poll_json(config: RemediatorConfig, result: PollResult) -> str:
    clusters = [
        {
            "cluster_id": name,
            "known_nodes": one.n_known,
            "active_nodes": one.n_active,
            "quorum_met": one.has_quorum,
            "panic_mode": one.in_panic,
            "age_s": one.judged_age_ns / NS_PER_S,
        }
        for name, one in sorted((result.reading.clusters or {}).items())
    ]
    findings = [
        {
            **ruling.finding.as_json(),
            "target": ruling.target,
            "would_act": ruling.is_allowed,
            "decision": describe_ruling(ruling, config.mode),
            "refusal": result.refusals.get(ruling.finding.episode, ""),
            "clauses": [clause.as_json() for clause in ruling.clauses],
        }
        for ruling in result.rulings
    ]
    page = {
        "mode": config.mode,
        "clusters": clusters,
        "findings": findings,
        "problems": list(result.reading.problems),
    }
    return json.dumps(page, indent=2)


def _poll_text(config: RemediatorConfig, result: PollResult) -> str:
    lines = [
        f"{name}: {one.n_active} of {plural(one.n_known, 'node')} active,"
        f" judged {format_duration(one.judged_age_ns)} ago"
        for name, one in sorted((result.reading.clusters or {}).items())
    ]
    lines = [*(lines or ["Fleet knows no cluster yet"]), *result.reading.problems]
    if not result.rulings:
        lines.append("no culprit: there is nothing to act on")
    for ruling in result.rulings:
        refusal = result.refusals.get(ruling.finding.episode, "")
        lines += ["", *_ruling_lines(config, ruling, refusal)]
    return "\n".join(lines)


def _ruling_lines(config: RemediatorConfig, ruling: Ruling, refusal: str) -> list[str]:
    finding = ruling.finding
    description = describe_ruling(ruling, config.mode)
    return [
        f"{finding.node_id} of {finding.cluster_id}: {finding.description}",
        click.style(f"  {description}", fg="yellow" if ruling.is_allowed else "green", bold=True),
        *([click.style(f"  but it would be refused: {refusal}", fg="red")] if refusal else []),
        *describe_clauses(tuple(clause.as_json() for clause in ruling.clauses)),
    ]


def watch(config: RemediatorConfig) -> int:
    """Look again and again until a signal."""
    set_up_logging("info", "console")
    path = Path(config.journal.file)
    prepare_folder(path)
    with catch_stop() as stop, JournalLock(path) as lock:
        if _await_lock(lock, path, stop.event, config.fleet.poll_interval):
            is_audited = config.audit is not None
            with (
                Journal(path, is_audited=is_audited) as journal,
                _build(config, journal) as remediator,
                _send_audit(config.audit, path) as audit,
            ):
                find_order = functools.partial(_find_order, config, remediator)
                signer = build_signer(config.approval)
                with (
                    _send_proposals(config, signer, path) as messages,
                    _serve(
                        config.listen,
                        RemediatorPage(
                            remediator.counts, journal.path, audit, find_order, messages
                        ),
                    ) as addresses,
                    _serve_answers(config, signer) as more_addresses,
                ):
                    _LOG.info("mode %s, journal %s", config.mode, path)
                    _log_actions_of_others(config, journal)
                    report_ready("ingero-remediator", addresses | more_addresses)
                    _poll_until(stop.event, config, remediator, signer)
    return stop.exit_status


def _log_actions_of_others(config: RemediatorConfig, journal: Journal) -> None:
    """Name what an earlier policy has done in another way, and this one will not give back."""
    for record in journal.actions():
        if record.state in HOLDING and record.kind != config.action.kind:
            _LOG.warning(
                "%s on %s was done by %s: it counts, and this policy, which acts through %s, leaves it as it is",
                record.action_id,
                record.target,
                record.kind,
                config.action.kind,
            )


def _find_order(config: RemediatorConfig, remediator: Remediator, node: str) -> str:
    """The answer to a node; asked in other threads."""
    max_age_ns = 3 * config.fleet.poll_interval + config.fleet.timeout
    now = read_moment(SystemClock(), read_boot())
    return find_order(remediator.orders, node, now, max_age_ns)


@contextmanager
def _on_thread(run: Callable[[Event], None], name: str) -> Iterator[None]:
    """Run it until the end; the event is set then."""
    is_over = Event()
    thread = Thread(target=run, args=(is_over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _send_audit(config: AuditConfig | None, path: Path) -> Iterator[AuditCounts | None]:
    """Send what the journal says, on a thread, until the end."""
    if config is None:
        yield None
        return
    sender = AuditSender(config, path, SystemClock())
    with _on_thread(sender.run, "audit"):
        yield sender.counts


@contextmanager
def _send_proposals(
    config: RemediatorConfig, signer: LinkSigner | None, path: Path
) -> Iterator[MessageCounts | None]:
    """Tell people of proposals, on a thread, until the end."""
    link = config.approval.link
    if link is None or signer is None or not link.send:
        yield None
        return
    sender = ProposalSender(config, signer, SystemClock())
    with _on_thread(functools.partial(sender.run, path), "proposals"):
        yield sender.counts


def _await_lock(lock: JournalLock, path: Path, stop: Event, poll_ns: int) -> bool:
    if lock.take():
        return True
    _LOG.warning("another remediator uses %s: waiting until it ends", path)
    while not stop.wait(poll_ns / NS_PER_S):
        if lock.take():
            _LOG.info("the other remediator of %s has ended", path)
            return True
    return False


@contextmanager
def _serve(listen: Endpoint | None, page: RemediatorPage) -> Iterator[dict[str, Endpoint]]:
    if listen is None:
        yield {}
        return
    with serve_metrics(page, str(listen), "listen") as bound:
        yield {"metrics": bound}


@contextmanager
def _serve_answers(
    config: RemediatorConfig, signer: LinkSigner | None
) -> Iterator[dict[str, Endpoint]]:
    link = config.approval.link
    if link is None or signer is None:
        yield {}
        return
    read_now = functools.partial(read_moment, SystemClock(), read_boot())
    page = ApprovalPage(config, signer, read_now)
    with serve_threaded(link.listen, page.respond, "approval.link.listen") as bound:
        yield {"approval": bound}


def _describe_stop(config: RemediatorConfig, stop_file: str) -> str:
    if not stop_file:
        return "no stop file is there any more"
    description = f"{stop_file} is there: nothing is done but what a person asks back"
    if stop_file == config.brakes.stop_file:
        return description
    return f"{description}; from now on use {config.brakes.stop_file}, this one may vanish"


def _poll_until(
    stop: Event, config: RemediatorConfig, remediator: Remediator, signer: LinkSigner | None
) -> None:
    logged: dict[str, str] = {}
    problems: tuple[str, ...] = ()
    stop_file = ""
    while True:
        result = remediator.poll()
        if result.stop_file != stop_file:
            stop_file = result.stop_file
            _LOG.warning("%s", _describe_stop(config, stop_file))
        if result.reading.problems != problems:
            problems = result.reading.problems
            for problem in problems or ("Fleet and the scheduler answer",):
                _LOG.warning("%s", problem)
        now = {
            one.finding.episode: f"{one.finding.node_id}: {describe_ruling(one, config.mode)}"
            for one in result.rulings
        }
        for episode, description in now.items():
            if logged.get(episode) != description:
                _LOG.info("%s %s", episode, description)
        logged = now
        _log_changes(result, signer)
        if stop.wait(config.fleet.poll_interval / NS_PER_S):
            return


def _log_changes(result: PollResult, signer: LinkSigner | None) -> None:
    for record in result.changed:
        _LOG.info(
            "%s on %s: %s, %s",
            record.action_id,
            record.target,
            record.state.value,
            record.note or "waits for `ingero-remediator approve`",
        )
        for label, link in (signer.build_links(record) if signer else {}).items():
            _LOG.info("%s: link of %s: %s", record.action_id, label, link)
    for test in result.tests:
        _LOG.info("%s on %s: %s, %s", test.test_id, test.suspect, test.state.value, test.note)

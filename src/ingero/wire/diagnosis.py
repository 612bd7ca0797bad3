"""Why a named worker is slow: Fleet asks its agent in the answer to a push, the agent tells by one OTLP log record.

``docs/specs/diagnosis.md`` is the specification. This module is the only place that knows the names on the wire: Fleet
builds the question and reads the record, the agent reads the question and builds the record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

from ingero.errors import BadDataError
from ingero.model.diagnosis import (
    DiagnosedCause,
    Diagnosis,
    DiagnosisRequest,
    Subject,
    describe_diagnosis,
)
from ingero.model.incidents import RuledOut
from ingero.otlp.codec import Export, structs
from ingero.wire.answers import EPISODE_ID, MAX_RANK, MAX_RECORDS, build_answer, read_about
from ingero.wire.log_records import LogSeverity, RecordsRead
from ingero.wire.names import MAX_ID_LENGTH
from ingero.wire.peer_work import parse_rates, write_rates
from ingero.wire.typed import read_large, read_number, read_text, read_texts

DIAGNOSIS_EVENT: Final = "ingero.diagnosis"
MAX_REQUEST_CHARS: Final = 1024
MAX_CAUSES: Final = 16
MAX_TEXTS: Final = 16
"""Entries of a list of texts; those beyond are cut off."""
MAX_TEXT_CHARS: Final = 512
_CAUSE: Final = "ingero.diagnosis.cause"
_CAUSES: Final = "ingero.diagnosis.causes"
_EXCESS_NS: Final = "ingero.diagnosis.excess_ns"
_WINDOW_NS: Final = "ingero.diagnosis.window_ns"
_N_OPS: Final = "ingero.diagnosis.n_ops"
_RULED_OUT: Final = "ingero.diagnosis.ruled_out"
_NEXT_STEPS: Final = "ingero.diagnosis.todo"
_DECLINED: Final = "ingero.diagnosis.declined"
_KIND: Final = re.compile(r"[a-z][a-z0-9-]{0,63}")
_MAX_NS: Final = 1 << 62
MAX_PEERS: Final = 8
"""Peers of a question; with more it is no question of ours."""
_FIELDS: Final = frozenset({"id", "rank", "job", "excess", "since_ns"})


def write_request(request: DiagnosisRequest) -> str:
    """The question as the value of a header: plain ASCII, as a URL's query."""
    fields = {
        "id": request.id,
        "rank": request.rank,
        "job": request.job,
        "excess": f"{request.excess_share:.4f}",
        "since_ns": request.since_ns,
    }
    if request.about:
        fields["about"] = request.about.value
    if request.peers:
        fields["peers"] = ",".join(map(str, request.peers))
    if request.peers_work is not None:
        fields["peers_work"] = write_rates(request.peers_work)
    elif request.is_work_asked:
        fields["peers_work"] = ""
    return urlencode(fields, errors="replace")


def parse_request(text: str | None) -> DiagnosisRequest | None:
    """The question in a header; None without one and where it is not one that can be bounded.

    Fields that are not known are passed over.
    """
    if not text or len(text) > MAX_REQUEST_CHARS:
        return None
    try:
        found = parse_qs(text, keep_blank_values=True, max_num_fields=16)
    except ValueError:
        return None
    one = {name: values[0] for name, values in found.items() if len(values) == 1}
    if not one.keys() >= _FIELDS or EPISODE_ID.fullmatch(one["id"]) is None:
        return None
    try:
        rank, since_ns, excess = int(one["rank"]), int(one["since_ns"]), float(one["excess"])
        about = Subject(one.get("about", ""))
        peers = tuple(int(text) for text in one.get("peers", "").split(",") if text)
        peers_work = parse_rates(one["peers_work"]) if one.get("peers_work") else None
    except ValueError:
        return None
    # An agent that does not know a subject cannot read a question without an excess, and leaves it alone.
    is_excess = 0.0 < excess <= 1.0 if about is Subject.SLOW else excess == 0.0
    is_bounded = -1 <= rank < MAX_RANK and 0 <= since_ns < _MAX_NS and is_excess
    are_bounded = len(peers) <= MAX_PEERS and all(0 <= peer < MAX_RANK for peer in peers)
    if not is_bounded or not are_bounded or len(one["job"]) > MAX_ID_LENGTH:
        return None
    return DiagnosisRequest(
        one["id"], rank, one["job"], excess, since_ns, about, peers, peers_work,
        is_work_asked=one.get("peers_work") == "",
    )  # fmt: skip


def build_diagnosis(diagnosis: Diagnosis, wall_ns: int) -> Export:
    """The answer as a logs export of the worker's node."""
    found: dict[str, Any] = {
        _CAUSE: diagnosis.cause,
        _CAUSES: [
            {
                "kind": str(cause.kind),
                "name": cause.name,
                "share": cause.share,
                "evidence": list(cause.evidence),
            }
            for cause in diagnosis.causes
        ],
        _EXCESS_NS: diagnosis.excess_ns,
        _WINDOW_NS: diagnosis.window_ns,
        _N_OPS: diagnosis.n_ops,
        _RULED_OUT: [
            {"name": one.name, "share": one.share, "why": one.why} for one in diagnosis.ruled_out
        ],
        _NEXT_STEPS: list(diagnosis.todo),
        _DECLINED: diagnosis.declined or None,
    }
    about, summary = (diagnosis.id, diagnosis.rank), describe_diagnosis(diagnosis)
    return build_answer(DIAGNOSIS_EVENT, about, found, LogSeverity.INFO, summary, wall_ns)


def build_diagnosis_read() -> RecordsRead[Diagnosis]:
    """Reads the diagnoses of one logs export."""
    return RecordsRead(read_diagnosis, "diagnoses", MAX_RECORDS)


def read_diagnosis(
    attributes: Mapping[str, structs.Value], resource: Mapping[str, structs.Value]
) -> Diagnosis:
    """The answer that a record holds; texts are cut to `MAX_TEXT_CHARS`.

    Raises:
        BadDataError: It names no worker or no episode, or a cause or a number makes no sense.
    """
    episode_id, rank = read_about(attributes, resource, "a diagnosis")
    declined = _cut(read_text(attributes.get(_DECLINED)) or "")
    causes = tuple(map(_read_cause, _read_maps(attributes, _CAUSES)))
    if bool(causes) is bool(declined):
        raise BadDataError("a diagnosis has causes or says why the agent did not look")
    return Diagnosis(
        id=episode_id,
        rank=rank,
        causes=causes,
        excess_ns=_read_count(attributes, _EXCESS_NS),
        window_ns=_read_count(attributes, _WINDOW_NS),
        n_ops=_read_count(attributes, _N_OPS),
        ruled_out=tuple(map(_read_ruled_out, _read_maps(attributes, _RULED_OUT))),
        todo=_read_list(attributes.get(_NEXT_STEPS)),
        declined=declined,
    )


def _read_maps(attributes: Mapping[str, structs.Value], name: str) -> list[dict[str, Any]]:
    found = attributes.get(name, [])
    if not isinstance(found, list) or len(found) > MAX_CAUSES:
        raise BadDataError(f"{name} is no list of at most {MAX_CAUSES} entries")
    maps = [one for one in found if isinstance(one, dict)]
    if len(maps) < len(found):
        raise BadDataError(f"{name} holds what is no map")
    return maps


def _read_cause(found: Mapping[str, Any]) -> DiagnosedCause:
    kind, name = found.get("kind"), read_text(found.get("name"))
    if not isinstance(kind, str) or _KIND.fullmatch(kind) is None or name is None:
        raise BadDataError(f"a cause is {kind!r:.60}, {name!r:.60}")
    return DiagnosedCause(kind, _cut(name), _read_share(found), _read_list(found.get("evidence")))


def _read_ruled_out(found: Mapping[str, Any]) -> RuledOut:
    name = _cut(read_text(found.get("name")) or "")
    return RuledOut(name, _read_share(found), _cut(read_text(found.get("why")) or ""))


def _read_share(found: Mapping[str, Any]) -> float:
    share = read_number(found.get("share"))
    if share is None or not 0.0 <= share <= 1.0:
        raise BadDataError(f"a share is {found.get('share')!r:.60}; 0 to 1")
    return share


def _read_count(attributes: Mapping[str, structs.Value], name: str) -> int:
    value = read_large(attributes.get(name))
    if value is None or not 0 <= value < _MAX_NS:
        raise BadDataError(f"{name} is {attributes.get(name)!r:.60}; a count")
    return value


def _read_list(value: object) -> tuple[str, ...]:
    return tuple(_cut(text) for text in (read_texts(value) or ())[:MAX_TEXTS])


def _cut(text: str) -> str:
    return text[:MAX_TEXT_CHARS]


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON-able values, for pages; who it is about stands beside it."""
    return {
        "cause": diagnosis.cause or None,
        "summary": describe_diagnosis(diagnosis),
        "causes": [
            {
                "cause": str(cause.kind),
                "name": cause.name,
                "share": cause.share,
                "evidence": list(cause.evidence),
            }
            for cause in diagnosis.causes
        ],
        "ruled_out": [
            {"name": one.name, "share": one.share, "why": one.why} for one in diagnosis.ruled_out
        ],
        "todo": list(diagnosis.todo),
        "excess_ns": diagnosis.excess_ns,
        "window_ns": diagnosis.window_ns,
        "n_ops": diagnosis.n_ops,
        "declined": diagnosis.declined or None,
    }

"""Quotas as a sender meets them, over both transports, and what its operator reads."""

import json

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from tests.echo.process import SERVICES, metrics, point, rejected
from tests.echo.service.conftest import ALL, ONE, TWO, ask
from tests.support import local_http
from tests.support.echo import RunningEcho

from ingero.config.acl import AclEntry, WriteQuota, parse_acl
from ingero.errors import ConfigError
from ingero.otlp.codec import decode_export
from ingero.otlp.names import ContentType, Signal


@pytest.fixture
def open_quota(tmp_path):
    """An Echo with an operator, a bearer with a quota for c1, and one without for c2."""
    opened = []

    def opening(**quota):
        entries = [
            AclEntry("operator", ALL, None),
            AclEntry("one", ONE, frozenset({"c1"}), quota=WriteQuota(**quota)),
            AclEntry("two", TWO, frozenset({"c2"})),
        ]
        echo = RunningEcho(tmp_path / "echo.db", entries, {"rate_per_second": 1000})
        opened.append(echo.__enter__())
        return opened[-1]

    yield opening
    for echo in opened:
        echo.__exit__(None, None, None)


def push(echo, document, token=ONE):
    return local_http.post(
        f"http://127.0.0.1:{echo.at.otlp_http.port}/v1/metrics",
        content=json.dumps(document),
        headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
        timeout=120,
    )


def call(echo, document, token=ONE):
    """Over gRPC; None, or the error."""
    export = decode_export(json.dumps(document).encode(), Signal.METRICS, ContentType.JSON)
    with grpc.insecure_channel(str(echo.at.otlp_grpc)) as channel:
        send = channel.unary_unary(f"/{SERVICES['metrics']}/Export")
        try:
            send(
                export.message.SerializeToString(),
                metadata=[("authorization", f"Bearer {token}")],
                timeout=120,
            )
        except grpc.RpcError as error:
            return error
    return None


def find_retry(error):
    """The RetryInfo of an error over gRPC; None where there is none."""
    given = dict(error.trailing_metadata()).get("grpc-status-details-bin")
    if given is None:
        return None
    retry = error_details_pb2.RetryInfo()
    (detail,) = status_pb2.Status.FromString(given).details
    return retry if detail.Unpack(retry) else None


def scrape(echo, token=ALL):
    """Values of the series of quotas, by name and labels without the bearer."""
    text = local_http.get(f"{echo.url}/metrics", headers={"authorization": f"Bearer {token}"}).text
    bearer = echo.bearers[1] and echo.service.access.bearers.principals[1].label
    return {
        line
        .partition(" ")[0]
        .replace(f'bearer="{bearer}",', "")
        .replace(f'bearer="{bearer}"', ""): float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if bearer in line and not line.startswith("#")
    }


def points(n, start=0, cluster="c1", name="m"):
    return metrics([point(rank=start + i) for i in range(n)], cluster=cluster, name=name)


@pytest.mark.parametrize(
    ("quota", "kind", "words"),
    [
        ({"rows_per_second": 10}, "rows", "10 rows a second"),
        ({"bytes_per_second": 500}, "bytes", "500 bytes a second"),
    ],
)
def test_who_writes_too_fast_is_told_which_quota_and_how_long_to_wait(
    open_quota, quota, kind, words
):
    echo = open_quota(**quota)
    assert push(echo, points(150)).status_code == 200  # what it began with room goes beyond
    refused = push(echo, points(1))
    assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (429, True)
    assert words in refused.json()["message"]
    error = call(echo, points(1))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert find_retry(error).retry_delay.seconds >= 1
    assert push(echo, points(1, cluster="c2"), TWO).status_code == 200
    assert scrape(echo)[f'ingero_echo_quota_refused_total{{quota="{kind}"}}'] == 2


def test_beyond_its_series_the_rows_of_those_it_has_are_kept_and_new_ones_refused_for_good(
    open_quota,
):
    echo = open_quota(max_series=100)
    assert rejected(push(echo, points(80))) == (0, "")
    n_refused, why = rejected(push(echo, points(80, start=50)))
    assert n_refused == 30
    assert "max_series of 100" in why
    assert call(echo, points(80)) is None  # partly taken: not to be sent again
    other = push(echo, points(5, start=500))
    assert other.status_code == 400
    assert "max_series of 100" in other.json()["message"]
    assert rejected(push(echo, points(80, cluster="c2"), TWO)) == (0, "")
    counted = local_http.post(
        f"{echo.url}/api/v2/sql",
        json={"sql": "SELECT count(DISTINCT attributes) FROM events WHERE cluster_id = 'c1'"},
        headers={"authorization": f"Bearer {ONE}"},
    )
    assert counted.json()["rows"] == [[100]]
    shown = scrape(echo)
    assert shown['ingero_echo_quota_refused_total{quota="series"}'] == 35
    assert shown['ingero_echo_quota_used_ratio{quota="series"}'] == 1
    assert shown["ingero_echo_bearer_rows_total{}"] == 80 + 50 + 80


def test_a_cluster_that_has_stored_all_it_may_is_refused_for_good_whoever_of_it_sends(open_quota):
    echo = open_quota(max_stored_bytes=4_000)
    row = 8 + 2 + 2 + 1 + 8 + 5 + len('{"rank":10}') + 16 + 8
    node = 8 + 2 + 2 + 3 * 8 + 8
    assert push(echo, points(60, start=10), ALL).status_code == 200
    shown = scrape(echo)
    assert shown['ingero_echo_quota_used_ratio{quota="storage"}'] == pytest.approx(
        (60 * row + node) / 4000
    )
    assert push(echo, points(60, start=100)).status_code == 200
    refused = push(echo, points(1))
    assert refused.status_code == 507
    assert "retry-after" not in refused.headers
    assert "max_stored_bytes of 3.91 KiB" in refused.json()["message"]
    error = call(echo, points(1))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert find_retry(error) is None  # OTLP: without it, it is not sent again
    assert push(echo, points(1, cluster="c2"), TWO).status_code == 200
    assert scrape(echo, ONE)['ingero_echo_quota_refused_total{quota="storage"}'] == 2
    assert ask(echo, "fleet.cluster.usage", {}, ONE).status_code == 200  # questions go on


def send_nodes(echo, first, n=5):
    """A point of each of some nodes that say much of themselves; the whole answer."""
    told = {"host.name": "h" * 1000, "ingero.provider": "p" * 1000}
    requests = [
        metrics([point()], cluster="c1", node=f"n{i}", **told) for i in range(first, first + n)
    ]
    return push(echo, {"resourceMetrics": [one["resourceMetrics"][0] for one in requests]})


def find_nodes(echo):
    answer = local_http.post(
        f"{echo.url}/api/v2/sql",
        json={"sql": "SELECT node_id FROM nodes ORDER BY 1"},
        headers={"authorization": f"Bearer {ONE}"},
    )
    return [node for (node,) in answer.json()["rows"]]


def test_a_node_of_which_every_row_is_refused_is_not_written(open_quota):
    echo = open_quota(max_series=2)
    assert rejected(send_nodes(echo, 0))[0] == 3
    refused = send_nodes(echo, 5)
    assert refused.status_code == 400
    assert "max_series of 2" in refused.json()["message"]
    assert find_nodes(echo) == ["n0", "n1"]
    assert rejected(send_nodes(echo, 1))[0] == 4  # one with a row is written as before
    assert find_nodes(echo) == ["n0", "n1"]


def test_what_nodes_say_of_themselves_counts_as_stored(open_quota):
    echo = open_quota(max_stored_bytes=18_000)
    n_rows_bytes = 5 * 1000  # events have the host, too
    assert send_nodes(echo, 0).status_code == 200
    used = scrape(echo)['ingero_echo_quota_used_ratio{quota="storage"}'] * 18_000
    assert 10_000 < used - n_rows_bytes < 11_000
    assert send_nodes(echo, 5).status_code == 200
    assert send_nodes(echo, 10).status_code == 507
    assert len(find_nodes(echo)) == 10


def test_the_report_names_who_stored_what(open_quota):
    echo = open_quota()
    assert push(echo, points(30)).status_code == 200
    assert push(echo, points(30, start=20), ALL).status_code == 200
    assert push(echo, points(7, cluster="c2"), TWO).status_code == 200
    keep = echo.service.store._writer.upkeep
    echo.service.store.call(
        lambda connection: keep.write_usage(echo.service.store._writer._now())
    ).result()
    operator, one, two = (known.label for known in echo.service.access.bearers.principals)

    def told(token, **args):
        answer = ask(echo, "fleet.cluster.usage", args, token).json()["result"]
        assert all(abs(row["n_series"] - row["n_rows"]) <= 1 for row in answer["rows"])
        return [(row["cluster_id"], row["bearer"], row["n_rows"]) for row in answer["rows"]]

    mine = [("c1", *pair) for pair in sorted([(one, 30), (operator, 30)])]
    assert told(ONE) == mine
    assert told(ALL, step="hour") == [*mine, ("c2", two, 7)]
    assert told(TWO, step="day") == [("c2", two, 7)]
    assert ask(echo, "fleet.cluster.usage", {"cluster_id": "c2"}, ONE).status_code == 403


def test_a_quota_of_a_bearer_that_changes_counts_at_once(open_quota):
    echo = open_quota(max_series=10)
    assert rejected(push(echo, points(20)))[0] == 10
    echo.bearers[1] = AclEntry("one", ONE, frozenset({"c1"}), quota=WriteQuota(max_series=15))
    echo.reload()
    assert rejected(push(echo, points(20)))[0] == 5
    assert scrape(echo)['ingero_echo_quota_used_ratio{quota="series"}'] == 1
    echo.bearers[1] = AclEntry("one", ONE, frozenset({"c1"}))
    echo.reload()
    assert rejected(push(echo, points(20)))[0] == 0
    assert 'ingero_echo_quota_used_ratio{quota="series"}' not in scrape(echo)


def test_the_file_gives_quotas_and_refuses_what_is_none():
    text = "- {key_name: a, token: aaaaaaaaaaaaaaaaa, allowed_clusters: [c], %s}"
    (entry,) = parse_acl(text % "max_series: 200000, max_stored_bytes: 50GiB", "f")
    assert entry.quota == WriteQuota(max_series=200_000, max_stored_bytes=50 << 30)
    for bad in ("max_series: 0", "max_series: many", "max_stored_bytes: -1"):
        with pytest.raises(ConfigError, match=bad.partition(":")[0]):
            parse_acl(text % bad, "f")

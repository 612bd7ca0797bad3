"""Senders that are known by their certificates, over both transports, with real TLS."""

import json
import ssl

import grpc
import httpx
import pytest
import trustme
from tests.echo.process import SERVICES, metrics, point
from tests.echo.service.conftest import ALL
from tests.support import local_http
from tests.support.echo import RunningEcho

from ingero.config.acl import AclEntry, parse_acl
from ingero.errors import ConfigError
from ingero.otlp.codec import decode_export
from ingero.otlp.names import ContentType, Signal
from ingero.serving.bearer import Bearers
from ingero.serving.tls import find_names
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

FLEET_1, FLEET_2 = "fleet-1.site.example", "fleet-2.site.example"


class Site:
    """An Echo that asks for certificates, its authority, and an authority of strangers."""

    def __init__(self, folder):
        self.folder, self.ca, self.strangers = folder, trustme.CA(), trustme.CA()
        server = self.ca.issue_cert("127.0.0.1")
        cert, key, clients = folder / "cert.pem", folder / "key.pem", folder / "clients.pem"
        server.cert_chain_pems[0].write_to_path(cert)
        server.private_key_pem.write_to_path(key)
        key.chmod(0o600)
        self.ca.cert_pem.write_to_path(clients)
        entries = [
            AclEntry("operator", ALL, None),
            AclEntry("one", "", frozenset({"c1"}), certificate=FLEET_1),
            AclEntry("two", "", frozenset({"c2"}), certificate=FLEET_2),
        ]
        settings = {
            "insecure_no_tls": False,
            "tls_cert": str(cert),
            "tls_key": str(key),
            "otlp_client_ca_file": str(clients),
        }
        self.echo = RunningEcho(folder / "echo.db", entries, settings)

    def push(self, name, document, token=None, ca=None):
        """Status over HTTP and code over gRPC of the same request, from who is called that; None shows nothing."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        chain = key = None
        if name is not None:
            shown = (ca or self.ca).issue_cert(name)
            shown.configure_cert(context)
            chain = b"".join(pem.bytes() for pem in shown.cert_chain_pems)
            key = shown.private_key_pem.bytes()
        given = {"authorization": f"Bearer {token}"} if token else {}
        body = json.dumps(document).encode()
        try:
            answer = local_http.post(
                f"https://127.0.0.1:{self.echo.at.otlp_http.port}/v1/metrics",
                content=body,
                headers={"content-type": "application/json", **given},
                verify=context,
                timeout=120,
            ).status_code
        except httpx.TransportError:
            answer = None
        export = decode_export(body, Signal.METRICS, ContentType.JSON).message.SerializeToString()
        trust = self.ca.cert_pem.bytes()
        credentials = grpc.ssl_channel_credentials(trust, key, chain)
        with grpc.secure_channel(str(self.echo.at.otlp_grpc), credentials) as channel:
            send = channel.unary_unary(f"/{SERVICES['metrics']}/Export")
            try:
                send(export, metadata=list(given.items()), timeout=120)
            except grpc.RpcError as error:
                return answer, error.code()
        return answer, grpc.StatusCode.OK


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("site"))
    with site.echo:
        yield site


def of(cluster, value):
    return metrics([point(value)], cluster=cluster)


TAKEN = (200, grpc.StatusCode.OK)
FORBIDDEN = (403, grpc.StatusCode.PERMISSION_DENIED)
UNKNOWN = (401, grpc.StatusCode.UNAUTHENTICATED)
NO_CONNECTION = (None, grpc.StatusCode.UNAVAILABLE)


def test_a_sender_is_who_its_certificate_names(site):
    assert site.push(FLEET_1, of("c1", 1.5)) == TAKEN
    assert site.push(FLEET_1, of("c2", 1.5)) == FORBIDDEN
    assert site.push(FLEET_2, of("c2", 2.5)) == TAKEN
    assert site.push("fleet-3.site.example", of("c1", 1.5)) == UNKNOWN


def test_who_shows_no_certificate_or_a_strangers_has_no_connection(site):
    assert site.push(None, of("c1", 3.5), token=ALL) == NO_CONNECTION
    assert site.push(FLEET_1, of("c1", 3.5), ca=site.strangers) == NO_CONNECTION


def test_a_token_goes_before_the_certificate_and_a_wrong_one_is_not_made_good_by_it(site):
    assert site.push(FLEET_1, of("c9", 1.5), token=ALL) == TAKEN
    assert site.push(FLEET_1, of("c1", 1.5), token="wrong-" + "x" * 20) == UNKNOWN
    # What names the entry in the log is no token.
    assert (
        site.push("fleet-3.site.example", of("c1", 1.5), token=f"certificate:{FLEET_1}") == UNKNOWN
    )


def test_a_certificate_is_revoked_at_the_next_reload(site):
    kept = site.echo.bearers[1]
    try:
        site.echo.bearers[1] = AclEntry(
            "one", "", frozenset({"c1"}), is_revoked=True, certificate=FLEET_1
        )
        site.echo.reload()
        assert site.push(FLEET_1, of("c1", 1.5)) == UNKNOWN
    finally:
        site.echo.bearers[1] = kept
        site.echo.reload()
    assert site.push(FLEET_1, of("c1", 1.5)) == TAKEN


def test_questions_need_no_certificate_and_a_bearer(site):
    context = ssl.create_default_context()
    site.ca.configure_trust(context)
    answer = local_http.get(
        f"{site.echo.url}/api/v2/whoami", headers={"authorization": f"Bearer {ALL}"}, verify=context
    )
    assert answer.status_code == 200


def test_a_common_name_counts_only_where_there_are_no_alternative_names():
    subject = ((("organizationName", "x"),), (("commonName", "by-subject"),))
    assert find_names({"subject": subject}) == ("by-subject",)
    both = {"subject": subject, "subjectAltName": (("DNS", "a.example"), ("URI", "spiffe://b/c"))}
    assert find_names(both) == ("a.example", "spiffe://b/c")
    assert find_names(None) == find_names({}) == ()


def test_an_expired_entry_is_nobody():
    clock = ManualClock()
    ends_ns = clock.wall_ns() + 10 * NS_PER_S
    bearers = Bearers([AclEntry("a", "", None, expires_wall_ns=ends_ns, certificate="a")], clock, 0)
    assert bearers.identify(None, ("b", "a")).key_name == "a"
    clock.advance(10 * NS_PER_S)
    assert bearers.identify(None, ("b", "a")) is None


@pytest.mark.parametrize(
    ("entry", "description"),
    [
        ("certificate: a, token: aaaaaaaaaaaaaaaaa, allowed_clusters: [c]", "beside a certificate"),
        ("certificate: '', allowed_clusters: [c]", "certificate"),
        ("allowed_clusters: [c]", "token"),
    ],
)
def test_an_entry_has_a_token_or_a_certificate(entry, description):
    with pytest.raises(ConfigError, match=description):
        parse_acl(f"- {{key_name: a, {entry}}}", "f")
    (good,) = parse_acl("- {key_name: a, certificate: spiffe://x/y, allowed_clusters: [c]}", "f")
    assert (good.certificate, good.token) == ("spiffe://x/y", "")
    twice = "- {key_name: %s, certificate: x, allowed_clusters: [c]}\n"
    with pytest.raises(ConfigError, match="another entry"):
        parse_acl(twice % "a" + twice % "b", "f")

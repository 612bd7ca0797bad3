"""Access tokens of an authorization server: which are taken, for whom, and what a client without one is told."""

import hmac
import json
import time
from base64 import urlsafe_b64encode

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from mcp.shared.auth import ProtectedResourceMetadata
from tests.serving.oauth_issuer import ISSUER, RESOURCE, Issuer

from ingero.errors import ConfigError
from ingero.serving.oauth import AccessTokens, OAuthSettings, check_urls
from ingero.testing.clock import ManualClock

NOW_S = int(time.time())


@pytest.fixture
def issuer(tmp_path):
    return Issuer(tmp_path / "jwks.json")


@pytest.fixture
def tokens(issuer):
    return build(issuer)


def build(issuer, claim="ingero_clusters", clock=None):
    settings = OAuthSettings(ISSUER, RESOURCE, str(issuer.file), claim, "Echo")
    return AccessTokens(settings, clock or ManualClock(wall_ns=NOW_S * 10**9))


def ask(tokens, token):
    return tokens.authenticate(f"Bearer {token}")


def sign_with_secret(token, secret):
    """The same claims as a token of HMAC, for which every secret is as good as a key."""
    head = msgspec.json.encode({"alg": "HS256", "kid": "k1"})
    signed = urlsafe_b64encode(head).rstrip(b"=") + b"." + token.split(".")[1].encode()
    mac = hmac.digest(secret, signed, "sha256")
    return (signed + b"." + urlsafe_b64encode(mac).rstrip(b"=")).decode()


@pytest.mark.parametrize(
    ("claim", "clusters"),
    [
        (["c1", "c2"], {"c1", "c2"}),
        ("c1 c2", {"c1", "c2"}),
        ("*", None),
        (["*"], None),
        (["*", "c1"], {"c1"}),
    ],
)
def test_a_token_may_touch_the_clusters_of_its_claim(issuer, tokens, claim, clusters):
    principal = ask(tokens, issuer.sign(ingero_clusters=claim))
    assert principal.key_name == "ada"
    assert principal.clusters == (None if clusters is None else frozenset(clusters))


@pytest.mark.parametrize("claim", [None, [], "", [1], {"c1": 1}])
def test_a_token_without_clusters_is_refused(issuer, tokens, claim):
    assert ask(tokens, issuer.sign(ingero_clusters=claim)) is None


def test_without_a_claim_to_look_for_a_token_may_everything(issuer):
    assert ask(build(issuer, claim=""), issuer.sign()).clusters is None


def test_a_renewed_token_is_the_same_principal_and_another_persons_is_not(issuer, tokens):
    first, renewed, other = (
        ask(tokens, issuer.sign(ingero_clusters="*", **more))
        for more in ({}, {"exp": NOW_S + 9000}, {"sub": "bob"})
    )
    assert first.digest == renewed.digest != other.digest


def test_what_does_not_fit_is_refused(issuer, tokens):
    stranger = ec.generate_private_key(ec.SECP256R1())
    public = issuer.file.read_bytes()
    wrong = {
        "issuer": issuer.sign(ingero_clusters="*", iss="https://login.example/realms/other"),
        "audience": issuer.sign(ingero_clusters="*", aud="https://other.example/mcp"),
        "ended": issuer.sign(ingero_clusters="*", exp=NOW_S - 31),
        "not begun": issuer.sign(ingero_clusters="*", nbf=NOW_S + 31),
        "no end": issuer.sign(ingero_clusters="*", drop=("exp",)),
        "no subject": issuer.sign(ingero_clusters="*", drop=("sub",)),
        "no audience": issuer.sign(ingero_clusters="*", drop=("aud",)),
        "another's key": issuer.sign(ingero_clusters="*", key=stranger),
        "unknown key": issuer.sign(ingero_clusters="*", kid="k9"),
        "public key as secret": sign_with_secret(issuer.sign(ingero_clusters="*"), public),
        "unsigned": jwt.encode({"sub": "ada"}, None, algorithm="none", headers={"kid": "k1"}),
        "no token": "nonsense",
        "nothing": "",
    }
    assert {name for name, token in wrong.items() if ask(tokens, token) is not None} == set()
    assert ask(tokens, issuer.sign(ingero_clusters="*", exp=NOW_S - 29)) is not None  # their clock
    assert tokens.authenticate(f"Basic {issuer.sign(ingero_clusters='*')}") is None
    assert tokens.authenticate(None) is None


def test_new_keys_are_taken_at_a_reload_and_a_bad_file_changes_nothing(issuer, tokens, caplog):
    old, issuer.key = issuer.sign(ingero_clusters="*"), ec.generate_private_key(ec.SECP256R1())
    new = issuer.sign(ingero_clusters="*")
    issuer.file.write_text("{")
    tokens.reload()
    assert (ask(tokens, old) is None, ask(tokens, new) is None) == (False, True)
    assert "the old ones stay" in caplog.text
    issuer.publish()
    tokens.reload()
    assert (ask(tokens, old) is None, ask(tokens, new) is None) == (True, False)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"keys": []}',
        json.dumps({
            "keys": [{"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "alg": "HS256"}]
        }),
    ],
)
def test_a_file_without_public_keys_is_refused_by_name(issuer, text):
    issuer.file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        build(issuer)
    assert str(issuer.file) in str(refused.value)


def test_the_metadata_is_where_the_challenge_points_and_is_what_mcp_clients_read(tokens):
    said = ProtectedResourceMetadata.model_validate_json(tokens.metadata)
    assert (str(said.resource), [str(one) for one in said.authorization_servers]) == (
        RESOURCE,
        [ISSUER],
    )
    place = "https://echo.example:8081/.well-known/oauth-protected-resource/mcp"
    assert tokens.challenge(None) == f'Bearer resource_metadata="{place}"'
    assert tokens.challenge("Bearer x").startswith('Bearer error="invalid_token", resource_m')
    assert place.endswith(tokens.path)


def test_urls_that_a_token_could_be_stolen_over_are_refused():
    assert check_urls(ISSUER, RESOURCE) == ""
    assert check_urls(ISSUER, "http://127.0.0.1:8081/mcp") == ""
    assert "issuer" in check_urls("http://login.example", RESOURCE)
    assert "resource" in check_urls(ISSUER, "http://echo.example/mcp")
    assert "resource" in check_urls(ISSUER, f"{RESOURCE}?x=1")

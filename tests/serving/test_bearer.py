import pytest

from ingero.config.acl import AclEntry, WriteQuota, check_token_mode, parse_acl, parse_token
from ingero.errors import ConfigError
from ingero.serving.bearer import Bearers
from ingero.serving.limits import RateLimiter
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

A = "a" * 32
B = "b" * 32


def test_a_bearer_is_recognised_whatever_the_case_of_the_scheme_and_nobody_else_is():
    bearers = Bearers([AclEntry("one", A, frozenset({"c1"}))], ManualClock(), 0)
    for scheme in ("Bearer", "bearer", "BEARER"):
        found = bearers.authenticate(f"{scheme} {A}")
        assert found is not None
        assert (found.key_name, found.may("c1"), found.may("c2")) == ("one", True, False)
    for wrong in (None, "", A, f"Basic {A}", f"Bearer {B}", "Bearer ", f"Bearer {A}x"):
        assert bearers.authenticate(wrong) is None


def test_a_rotated_token_lives_through_its_grace_and_not_longer():
    clock = ManualClock()
    bearers = Bearers([AclEntry("one", A, None)], clock, 300 * NS_PER_S)
    (live,) = bearers.replace([AclEntry("one", B, None)])
    clock.advance(299 * NS_PER_S)
    old, new = bearers.authenticate(f"Bearer {A}"), bearers.authenticate(f"Bearer {B}")
    assert old is not None
    assert new is not None
    assert new.digest == live
    clock.advance(2 * NS_PER_S)
    assert bearers.authenticate(f"Bearer {A}") is None
    bearers.replace([AclEntry("one", B, None)])
    assert bearers.authenticate(f"Bearer {A}") is None


def test_narrowed_rights_of_a_kept_token_count_at_once():
    bearers = Bearers([AclEntry("one", A, None)], ManualClock(), 300 * NS_PER_S)
    bearers.replace([AclEntry("one", A, frozenset({"c1"}))])
    found = bearers.authenticate(f"Bearer {A}")
    assert found is not None
    assert not found.may("c2")


def test_the_acl_file_reads_as_yaml_and_as_json():
    yaml_text = f"- key_name: one\n  token: {A}\n  allowed_clusters: [c1, c2]\n- {{key_name: all, token: {B}, allowed_clusters: ['*']}}\n"
    json_text = f'[{{"key_name":"one","token":"{A}","allowed_clusters":["c1","c2"]}},{{"key_name":"all","token":"{B}","allowed_clusters":["*"]}}]'
    for text in (yaml_text, json_text):
        one, everything = parse_acl(text, "acl")
        assert one.clusters == {"c1", "c2"}
        assert everything.clusters is None
        assert A not in repr(one)


@pytest.mark.parametrize(
    ("text", "line", "description"),
    [
        (f"- key_name: one\n  token: {A}\n  allowed_clusters: []\n", 3, "empty"),
        (f"- key_name: one\n  token: {A}\n", 1, "missing"),
        (f"- key_name: one\n  token: {A}\n  allowed_clusters: c1\n", 3, "list"),
        (f"- key_name: one\n  token: {A}\n  allowed_clusters: ['*', c1]\n", 3, "other names"),
        (f"- key_name: one\n  token: {A}\n  allowed_clusters: ['c 1']\n", 3, "no cluster id"),
        ("- key_name: one\n  token: two words\n  allowed_clusters: [c]\n", 2, "white space"),
        (f"- key_name: one\n  tokens: {A}\n  allowed_clusters: [c]\n", 2, "unknown key"),
        (f"key_name: one\ntoken: {A}\n", 1, "not a list"),
        (f"- key_name: one\n  token: {A}\n  allowed_clusters: [c]\n  scopes: read\n", 4, "list of"),
        (f"- key_name: one\n  token: {A}\n  allowed_clusters: [c]\n  scopes: []\n", 4, "list of"),
        (
            f"- key_name: one\n  token: {A}\n  allowed_clusters: [c]\n  scopes: [read, admin]\n",
            4,
            "list of",
        ),
        (
            f"- key_name: one\n  token: {A}\n  allowed_clusters: [c]\n  expires: soon\n",
            4,
            "no time",
        ),
        (
            f"- key_name: one\n  token: {A}\n  allowed_clusters: [c]\n  expires: 2027-01-01T10:00\n",
            4,
            "no time zone",
        ),
        (
            f"- key_name: one\n  token: {A}\n  allowed_clusters: [c]\n  rows_per_second: many\n",
            4,
            "not a size",
        ),
        (
            f"- key_name: one\n  token: {A}\n  allowed_clusters: [c]\n  bytes_per_second: 0\n",
            4,
            "is 0",
        ),
        ("- [\n", 2, "not YAML"),
        ("[]", 1, "no bearers"),
        (
            f"- key_name: one\n  token: {A}\n  allowed_clusters: [c]\n- key_name: two\n  token: {A}\n  allowed_clusters: [d]\n",
            4,
            "another entry's token",
        ),
    ],
)
def test_a_wrong_acl_file_is_refused_with_the_line_and_without_a_token(text, line, description):
    with pytest.raises(ConfigError) as raised:
        parse_acl(text, "acl.yaml")
    assert any(description in p.message and p.line == line for p in raised.value.problems), str(
        raised.value
    )
    assert A not in str(raised.value)


def test_empty_means_all_only_when_asked_for():
    text = f"- key_name: one\n  token: {A}\n  allowed_clusters: []\n"
    assert parse_acl(text, "acl", is_empty_all=True)[0].clusters is None


def test_a_bucket_gives_its_burst_then_its_rate_per_key():
    clock = ManualClock()
    limiter = RateLimiter(30, 100, clock)
    assert [limiter.take("a") for _ in range(100)] == [0.0] * 100
    assert limiter.take("a") == pytest.approx(1 / 30)
    assert limiter.take("b") == 0
    clock.advance(NS_PER_S)
    assert [limiter.take("a") for _ in range(30)] == [0.0] * 30
    assert limiter.take("a") > 0


def test_buckets_are_bounded():
    limiter = RateLimiter(1, 1, ManualClock(), max_keys=2)
    assert [limiter.take(key) for key in ("a", "b", "c", "b")][:3] == [0.0, 0.0, 0.0]
    assert limiter.take("b") > 0
    assert limiter.take("a") == 0


def test_a_revoked_token_is_refused_at_once_also_when_it_left_before():
    clock = ManualClock()
    bearers = Bearers([AclEntry("one", A, None), AclEntry("two", B, None)], clock, 300 * NS_PER_S)
    bearers.replace([AclEntry("two", B, None)])
    assert bearers.authenticate(f"Bearer {A}") is not None
    live = bearers.replace([
        AclEntry("one", A, frozenset(), is_revoked=True),
        AclEntry("two", B, None),
    ])
    assert bearers.authenticate(f"Bearer {A}") is None
    assert bearers.authenticate(f"Bearer {B}") is not None
    assert len(live) == 1


def test_a_tokens_own_grace_goes_before_the_servers():
    clock = ManualClock()
    entries = [AclEntry("one", A, None, grace_ns=0), AclEntry("two", B, None, grace_ns=NS_PER_S)]
    bearers = Bearers(entries, clock, 300 * NS_PER_S)
    bearers.replace([AclEntry("three", "c" * 32, None)])
    assert bearers.authenticate(f"Bearer {A}") is None
    assert bearers.authenticate(f"Bearer {B}") is not None
    clock.advance(NS_PER_S)
    assert bearers.authenticate(f"Bearer {B}") is None


def test_grace_and_revocation_are_read_from_the_file():
    text = (
        f"- {{key_name: one, token: {A}, allowed_clusters: ['*'], grace: 0s}}\n"
        f"- {{key_name: two, token: {B}, revoked: true}}\n"
    )
    one, two = parse_acl(text, "acl")
    assert (one.grace_ns, one.is_revoked) == (0, False)
    assert (two.is_revoked, two.clusters) == (True, frozenset())


@pytest.mark.parametrize(
    ("entry", "description"),
    [
        ("token: short, allowed_clusters: [c]", "shorter than 16"),
        (f"token: {A}, allowed_clusters: [c], grace: soon", "grace"),
        (f"token: {A}, allowed_clusters: [c], revoked: maybe", "true or false"),
        (f"token: {A}, revoked: true", "no bearers"),
        (f"token: {A}, revoked: false", "allowed_clusters"),
    ],
)
def test_what_a_token_cannot_be_is_refused(entry, description):
    with pytest.raises(ConfigError, match=description) as raised:
        parse_acl(f"- {{key_name: one, {entry}}}\n", "acl")
    assert A not in str(raised.value)


def test_a_token_file_of_one_character_is_refused():
    with pytest.raises(ConfigError, match="shorter than 16"):
        parse_token("a\n", "token")
    assert parse_token("a" * 16, "token")[0].token == "a" * 16


@pytest.mark.parametrize(
    ("mode", "loose", "is_taken"),
    [
        (0o600, False, True),
        (0o400, False, True),
        (0o640, False, True),
        (0o440, False, True),
        (0o644, False, False),
        (0o604, False, False),
        (0o644, True, True),
        (0o660, False, False),
        (0o666, False, False),
        (0o666, True, False),
        (0o620, True, False),
    ],
)
def test_a_token_file_is_its_owners_and_its_group_may_read_it(mode, loose, is_taken):
    if is_taken:
        check_token_mode("token", mode, allows_loose=loose)
        return
    with pytest.raises(ConfigError, match=f"mode {mode:o}") as raised:
        check_token_mode("token", mode, allows_loose=loose)
    assert "chmod 600" in raised.value.hint


def test_an_entry_says_what_a_bearer_may_do_until_when_and_how_much():
    head = f"- key_name: one\n  token: {A}\n  allowed_clusters: [c]\n"
    (plain,) = parse_acl(head, "acl")
    assert plain.scopes == {"read", "write"}
    assert plain.expires_wall_ns is None
    assert plain.quota == WriteQuota()
    more = "  scopes: [write]\n  expires: 2027-01-01T02:00:00+02:00\n  rows_per_second: 20000\n  bytes_per_second: 8MiB\n"
    (entry,) = parse_acl(head + more, "acl")
    assert entry.scopes == {"write"}
    assert entry.expires_wall_ns == 1_798_761_600 * NS_PER_S
    assert entry.quota == WriteQuota(20_000, 8 << 20)
    (dated,) = parse_acl(head + "  expires: 2027-01-01\n", "acl")
    assert dated.expires_wall_ns == entry.expires_wall_ns
    bearers = Bearers([entry], ManualClock(), 0)
    found = bearers.authenticate(f"Bearer {A}")
    assert found is not None
    assert (found.scopes, found.quota) == (entry.scopes, entry.quota)


def test_a_token_is_refused_from_the_moment_it_expires_also_within_its_grace():
    clock = ManualClock()
    ends = clock.wall_ns() + 60 * NS_PER_S
    entry = AclEntry("one", A, None, expires_wall_ns=ends)
    bearers = Bearers([entry], clock, 300 * NS_PER_S)
    clock.advance(59 * NS_PER_S)
    assert bearers.authenticate(f"Bearer {A}") is not None
    bearers.replace([AclEntry("two", B, None)])
    assert bearers.authenticate(f"Bearer {A}") is not None
    clock.advance(NS_PER_S)
    assert bearers.authenticate(f"Bearer {A}") is None
    assert bearers.authenticate(f"Bearer {B}") is not None

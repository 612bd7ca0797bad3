"""YAML as the collector reads it: lines kept, environment filled in, hostile text refused."""

import pytest

from ingero.config.document import MAX_BYTES, load_document, parse_document
from ingero.config.model import EnvText
from ingero.errors import ConfigError


def _problems(text, **environ):
    return [str(one) for one in parse_document(text, environ=environ).problems]


def test_plain_scalars_follow_the_core_schema_of_yaml_1_2():
    tree = parse_document(
        "{a: yes, b: 1:30, c: 2026-01-01, d: 0x10, e: 1e3, f: ~, g: True, h: '5', i: 010, j: .5}",
        environ={},
    ).tree
    assert tree == {
        "a": "yes", "b": "1:30", "c": "2026-01-01", "d": 16, "e": 1000.0, "f": None, "g": True,
        "h": "5", "i": 10, "j": 0.5,
    }  # fmt: skip
    assert type(tree["e"]) is float


def test_each_key_and_item_has_its_line():
    document = parse_document("a:\n  b: 1\n  c:\n    - x\n    - y: 2\n", environ={})
    assert document.lines["a",] == 1
    assert document.lines["a", "b"] == 2
    assert document.lines["a", "c", 0] == 4
    assert document.lines["a", "c", 1, "y"] == 5


def test_key_that_stands_twice_is_refused_with_both_lines():
    assert _problems("a:\n  x: 1\n  y: 2\n  x: 3\n") == [
        "line 4: a.x: stands twice; the first is on line 2"
    ]


def test_anchors_aliases_and_merge_keys_are_filled_in_and_own_keys_win():
    tree = parse_document(
        "base: &b {x: 1, y: 2}\nuse: {<<: *b, y: 3}\nlist: [*b]\nboth: {<<: [{x: 7}, *b]}",
        environ={},
    ).tree
    assert tree["use"] == {"x": 1, "y": 3}
    assert tree["list"] == [{"x": 1, "y": 2}]
    assert tree["both"] == {"x": 7, "y": 2}


def test_alias_that_contains_itself_is_a_problem_not_a_loop():
    assert "contains itself" in _problems("a: &a [*a]")[0]


def test_bombs_are_refused_before_they_grow():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="more than 100000 values"):
        parse_document("\n".join(lines), environ={})
    with pytest.raises(ConfigError, match=r"levels|depth"):
        parse_document("a: " + "[" * 200 + "]" * 200, environ={})
    with pytest.raises(ConfigError, match="not YAML"):
        parse_document("[" * 20_000, environ={})


def test_tags_cannot_make_objects():
    assert (
        "!!python/object/apply:os.system is not supported"
        in (_problems("a: !!python/object/apply:os.system ['true']")[0])
    )


def test_syntax_error_has_its_line():
    with pytest.raises(ConfigError, match="line 2: not YAML"):
        parse_document("a: [1\nb: 2", environ={})


def test_environment_is_filled_in_whole_in_part_and_by_default():
    tree = parse_document(
        'a: ${env:A}\nb: "x-${env:A}-y"\nc: ${env:NONE:-5s}\nd: ${env:EMPTY:-d}\ne: a$$b$${env:A}',
        environ={"A": "5", "EMPTY": ""},
    ).tree
    assert tree == {"a": "5", "b": "x-5-y", "c": "5s", "d": "d", "e": "a$b${env:A}"}
    assert isinstance(tree["a"], EnvText)
    assert not isinstance(tree["b"], EnvText)


def test_missing_variable_and_foreign_interpolation_are_problems_with_the_fix():
    found = _problems("a: ${env:NOPE}\nb: ${NOPE}\nc: ${file:/etc/passwd}")
    assert found == [
        "line 1: a: the environment has no NOPE (set it, or write ${env:NOPE:-default})",
        "line 2: b: ${NOPE} cannot be filled in (write ${env:NOPE})",
        "line 3: c: ${file:/etc/passwd} cannot be filled in (only ${env:NAME} is known)",
    ]


def test_text_from_the_environment_cannot_add_yaml():
    tree = parse_document("a: ${env:A}", environ={"A": "1\nb: 2"}).tree
    assert tree == {"a": "1\nb: 2"}


def test_overrides_win_over_the_file_and_make_what_is_missing(tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text("a:\n  b: 1\n  c: 2\n")
    tree = load_document(file, ["a.b=[3, 4]", "x.y.z=true", "a.d=1=2"], {}).tree
    assert tree == {"a": {"b": [3, 4], "c": 2, "d": "1=2"}, "x": {"y": {"z": True}}}


@pytest.mark.parametrize("override", ["novalue", "=1", "a..b=1"])
def test_override_that_is_no_assignment_is_refused(tmp_path, override):
    file = tmp_path / "f.yaml"
    file.write_text("a: 1")
    with pytest.raises(ConfigError, match="is not key=value"):
        load_document(file, [override], {})


def test_unreadable_oversized_and_binary_files_say_so(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml: No such file"):
        load_document(tmp_path / "nowhere.yaml")
    (tmp_path / "big.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_document(tmp_path / "big.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_document(tmp_path / "binary.yaml")


def test_document_that_is_no_mapping_is_refused_and_an_empty_one_is_empty():
    with pytest.raises(ConfigError, match="not a mapping"):
        parse_document("- a", environ={})
    assert parse_document("# nothing\n", environ={}).tree == {}


def test_infinity_is_no_setting():
    assert "not a finite number" in _problems("a: .inf")[0]

"""``ingero hang`` as a person runs it."""

import json

import pytest
from click.testing import CliRunner

from ingero.cli.commands.hang import command
from ingero.cli.main import run_program


def test_json_names_the_missing_ranks(data_dir):
    result = CliRunner().invoke(
        command, [str(data_dir / "flight_recorder/gpu_error_1st"), "--json"]
    )
    answer = json.loads(result.output)
    assert answer["missing_ranks"] == [12, 14]
    assert answer["roots"][0]["group"]["says"] == "TENSOR_MODEL_PARALLEL_GROUP"
    assert answer["roots"][0]["last_finished_seq"] == 42805
    assert answer["ranks_without_dump"] == []


@pytest.mark.parametrize(
    ("n_ranks", "note"),
    [("16", ""), ("20", "note: --ranks 20 is not used: the dumps name 16 ranks\n")],
)
def test_a_number_of_ranks_that_the_dumps_do_not_name_is_said_to_be_unused(data_dir, n_ranks, note):
    folder = str(data_dir / "flight_recorder/gpu_error_1st")
    result = CliRunner().invoke(command, [folder, "--ranks", n_ranks, "--json"])
    assert result.stderr == note
    assert json.loads(result.stdout)["ranks_known"] == 16


def test_text_says_who_where_and_whom_it_blocks(data_dir):
    result = CliRunner().invoke(command, [str(data_dir / "flight_recorder/lock_gil_1st")])
    assert "rank 9 never arrived: its host never entered" in result.output
    assert "blocks         13 ranks: 0-5, 7-8, 10-13, 15" in result.output
    assert "\x1b[" not in result.output


def test_directory_without_dumps_is_an_error_with_the_next_step(tmp_path, capsys):
    assert run_program(command, [str(tmp_path)]) == 1
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" in capsys.readouterr().err


@pytest.mark.parametrize(
    "body",
    [b"\x80\x04garbage", b"not a pickle", b"{", b"", b"\x80\x05}.", b'{"pg_config": 1, "entries": 2}',
     b'{"pg_config": {}, "entries": [{"x": 1}]}', b"(lp0\nI1\naI", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f"],
)  # fmt: skip
def test_a_file_that_is_no_dump_is_named_in_our_words(tmp_path, capsys, body):
    (tmp_path / "dump_0").write_bytes(body)
    assert run_program(command, [str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "dump_0") in said
    assert not any(
        word in said
        for word in ("Error", "load key", "memo", "MARK", "opcode", "ran out of", "frame")
    )


def test_an_address_that_is_none_is_said_on_a_line(capsys):
    assert run_program(command, ["--fleet", "http://[::1", "--cluster-id", "prod"]) == 1
    assert (
        "error: Fleet's admin endpoint http://[::1 does not tell hangs: " in capsys.readouterr().err
    )

"""What `ingero up` refuses before it starts anything."""

from ingero.cli.main import cli, run_program


def test_one_rank_has_nobody_to_be_compared_with(capsys, monkeypatch):
    monkeypatch.setattr("ingero.sim.cluster.run.run_up", lambda *_: {})
    assert run_program(cli, ["up", "--ranks", "1", "--json"]) == 2
    assert "2<=x<=64" in capsys.readouterr().err


def test_a_file_that_is_there_is_replaced_by_a_recording_only_where_that_is_said(
    tmp_path, capsys, monkeypatch
):
    begun = []
    monkeypatch.setattr("ingero.sim.cluster.run.run_up", lambda *_: begun.append(1) or {})
    kept = tmp_path / "run.parquet"
    kept.touch()
    asked = ["up", "--no-probes", "--json", "--record"]
    assert run_program(cli, [*asked, str(kept)]) == 2
    assert "run.parquet exists already; --force replaces it" in capsys.readouterr().err
    assert run_program(cli, [*asked, str(tmp_path), "--force"]) == 2
    assert "is not a regular file" in capsys.readouterr().err
    assert begun == []
    assert run_program(cli, [*asked, str(kept), "--force"]) == 0
    assert begun == [1]


def test_a_recording_is_not_asked_of_what_keeps_none(tmp_path, capsys):
    record = str(tmp_path / "run.parquet")
    assert run_program(cli, ["up", "--slurm", "--record", record]) == 2
    assert "--slurm keeps no recording" in capsys.readouterr().err

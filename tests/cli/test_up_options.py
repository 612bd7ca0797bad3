"""What `ingero up` refuses before it starts anything."""

from ingero.cli.main import cli, run_program


def test_one_rank_has_nobody_to_be_compared_with(capsys, monkeypatch):
    monkeypatch.setattr("ingero.sim.cluster.run.run_up", lambda *_: {})
    assert run_program(cli, ["up", "--ranks", "1", "--json"]) == 2
    assert "2<=x<=64" in capsys.readouterr().err

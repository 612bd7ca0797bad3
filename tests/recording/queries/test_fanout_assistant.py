"""What an assistant asks of several nodes, and of one."""

import pytest
from tests.recording.queries.node_servers import COUNT, among_servers, ask_fleet

from ingero.errors import BadDataError


def test_assistant_asks_all_nodes_and_reads_who_failed(paths, dead):
    def talk(nodes):
        nodes = [*nodes, dead]
        chains = ask_fleet(nodes, action="chains", since="")
        ops = ask_fleet(nodes, action="ops", limit=2)
        more = ask_fleet(nodes, action="ops", limit=100, cursor=ops["next_cursor"])
        return nodes, chains, ops, more, ask_fleet(nodes, action="sql", query=COUNT["sql"])

    nodes, chains, ops, more, counted = among_servers(paths, talk)
    assert [(row[0], row[1]) for row in chains["rows"]] == [(nodes[0], "MEDIUM")]
    assert [bool(one.get("error")) for one in chains["nodes"]] == [False, False, True]
    assert chains["warnings"][0].startswith(dead)
    assert len(ops["rows"]) == 2
    assert ops["rows"][0] not in more["rows"]
    assert counted["rows"] == [[nodes[0], 200], [nodes[1], 200]]


def test_every_column_of_an_overview_is_of_the_time_that_was_asked_for(data_dir):
    path = data_dir / "agent_dbs/pytorch-dataloader-starvation.db"

    def talk(nodes):
        counted = "SELECT count(*), (max(timestamp) - min(timestamp)) / 1e9 FROM events"
        within = "WHERE timestamp >= (SELECT max(timestamp) FROM events) - 5000000000"
        return (
            [
                ask_fleet(nodes, action="overview", since=since)["rows"][0][1:4]
                for since in ("5s", "", "1w")
            ],
            [
                ask_fleet(nodes, action="sql", query=sql, since="")["rows"][0][1:]
                for sql in (f"{counted} {within}", counted)
            ],
            ask_fleet(nodes, action="chains", since="5s")["rows"],
        )

    (part, whole, week), (part_counted, counted), chains = among_servers([path], talk)
    assert part[:2] == part_counted != counted
    assert part[2] == len(chains)
    assert whole[:2] == week[:2] == counted


def test_overview_of_a_process_or_of_nothing_counts_what_is_there(data_dir):
    path = data_dir / "agent_dbs/pytorch-dataloader-starvation.db"

    def talk(nodes):
        return [
            ask_fleet(nodes, action="overview", since="", pid=pid)["rows"][0][1:]
            for pid in (2260, 999_999)
        ], ask_fleet(nodes, action="sql", query="SELECT count(*) FROM events WHERE pid = 2260")

    (one, nobody), counted = among_servers([path], talk)
    assert one[0] == counted["rows"][0][1]
    assert nobody == [0, 0.0, 0, ""]


@pytest.mark.parametrize("given", [{"since": "1h"}, {"pid": 7}])
def test_sql_of_an_assistant_with_a_window_that_it_does_not_have_is_refused(given):
    with pytest.raises(BadDataError, match="since and pid choose no rows of sql"):
        ask_fleet(["127.0.0.1:1"], action="sql", query="SELECT 1", **given)


def test_assistant_that_mixes_up_actions_is_told(paths):
    with pytest.raises(BadDataError, match="sql"):
        ask_fleet(["127.0.0.1:1"], action="ops", query="SELECT 1")

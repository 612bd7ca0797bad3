"""`ingero-echo report` of a running Echo: for people, as JSON and in FOCUS columns."""

import csv
import datetime as dt
import io
import json

import pytest
from tests.echo.service.conftest import ALL, push

from ingero.cli.main import run_program
from ingero.cli.programs.echo import cli
from ingero.cli.programs.echo_focus import FOCUS_COLUMNS, write_ndjson
from ingero.otlp.names import Signal
from ingero.wire.costs import CHARGED, UNATTRIBUTED, CostRecord, build_cost_records
from ingero.wire.remediation import RemediationEntry, build_remediation_records
from ingero.wire.verdicts import VerdictRecord, build_verdict_records

NOW = dt.datetime.now(dt.UTC)
MONDAY = (NOW - dt.timedelta(days=NOW.weekday())).replace(hour=0, minute=0, second=0, microsecond=0)
LAST = MONDAY - dt.timedelta(weeks=1)
PAID = {"provider": "aws", "gpu_model": "NVIDIA L4", "currency": "USD"}
# FOCUS 1.4, Cost and Usage: what every row must have; the two that may be null in our rows.
MANDATORY = {
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost",
    "EffectiveCost", "HostProviderName", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit",
    "ServiceCategory", "ServiceName", "ServiceProviderName",
}  # fmt: skip
NULLABLE = {"ChargeClass", "HostProviderName"}


def at_ns(moment):
    return int(moment.timestamp()) * 10**9


def act(echo):
    """An action on the Sunday, of which no operations are known."""
    entry = RemediationEntry(
        seq=1, wall_ns=at_ns(MONDAY - dt.timedelta(hours=1)), cluster_id="c1", node_id="n3", entry="action", episode="e",
        action_id="a1", target="h3", actuator="slurm", state="done", evidence='{"rank": 3, "onset_entry_ns": 1}',
    )  # fmt: skip
    assert push(echo, build_remediation_records([entry]), signal=Signal.LOGS).status_code == 200


@pytest.fixture
def told(open_echo, tmp_path, capsys):
    """Runs the report; its exit status, output and complaints."""
    echo = open_echo()
    for moment, costs in (
        (MONDAY - dt.timedelta(seconds=1), [
            CostRecord(gpu_seconds=7200.0, attributed=CHARGED, node_id="n3", rank=3, amount=5.0, **PAID),
            CostRecord(gpu_seconds=36.0, attributed=UNATTRIBUTED, amount=0.025, **PAID),
            CostRecord(gpu_seconds=9.0, attributed=CHARGED, node_id="n4", rank=4),
        ]),
        (LAST - dt.timedelta(weeks=4), [CostRecord(gpu_seconds=1.0, attributed=CHARGED, node_id="n9", rank=9)]),
        (LAST, [
            CostRecord(gpu_seconds=-1.0, attributed=CHARGED, node_id="n5", rank=5, amount=-0.5, **PAID),
            CostRecord(gpu_seconds=3.0, attributed=CHARGED, node_id="n6", rank=6, amount=1.5, currency="USD"),
        ]),
    ):  # fmt: skip
        export = build_cost_records("c1", costs, at_ns(moment))
        assert push(echo, export, signal=Signal.LOGS).status_code == 200
    verdicts = [
        VerdictRecord(
            kind="culprit", node_id="n3", rank=3, worker="w", resource=(("slurm.job.id", "77"),)
        )
    ]
    verdicts += [
        VerdictRecord(kind="drag", node_id="n4", rank=4, worker="w", job=job) for job in ("a", "b")
    ]
    assert (
        push(
            echo, build_verdict_records("c1", verdicts, at_ns(LAST)), signal=Signal.LOGS
        ).status_code
        == 200
    )
    act(echo)
    token = tmp_path / "token"
    token.write_text(ALL)

    def run(*arguments, token_file=token):
        status = run_program(
            cli, ["report", "--url", echo.url, "--token-file", str(token_file), *arguments]
        )
        said = capsys.readouterr()
        return status, said.out, said.err

    run.echo = echo
    return run


def test_a_person_reads_each_week_whom_it_is_charged_to_and_what_was_done(told):
    status, out, _ = told()
    assert status == 0
    *lines, last = out.splitlines()
    assert lines == [
        f"week of {LAST:%Y-%m-%d}: 2.0 GPU-hours, 6.03 USD; 2.0 GPU-hours charged to nodes",
        "  c1 n3 rank 3 of job 77: 2.0 GPU-hours, 5.00 USD",
        "  c1 nobody in particular: 36.0 GPU-seconds, 0.03 USD",
        "  c1 n4 rank 4: 9.0 GPU-seconds",
        "  c1 n6 rank 6: 3.0 GPU-seconds, 1.50 USD",
        "  c1 n5 rank 5: -1.0 GPU-seconds, -0.50 USD",
        (
            "  action on c1 n3 rank 3: not known what it saved: the GPUs of the job are not known: no operations of it were "
            "kept from before the action"
        ),
    ]
    assert last.startswith("assumed: without it the later operations would have taken as long")
    assert "steps done twice" in last
    rows = json.loads(told("--json")[1])
    assert {row["node_id"]: row["job"] for row in rows["rows"]} == {
        "n3": "77", "n4": None, "n5": None, "n6": None, None: None,
    }  # fmt: skip
    (total, unpriced) = rows["totals"]
    assert (total["charged_gpu_seconds"], total["unattributed_gpu_seconds"]) == (7202.0, 36.0)
    assert (total["charged_amount"], total["unattributed_amount"]) == (6.0, 0.025)
    assert (unpriced["currency"], unpriced["charged_gpu_seconds"], unpriced["charged_amount"]) == (
        None,
        9.0,
        None,
    )
    assert [one["action_id"] for one in rows["actions"]["savings"]] == ["a1"]


def test_weeks_are_whole_but_for_the_current_one(told):
    def find_nodes(weeks):
        return {row["node_id"] for row in json.loads(told("--weeks", weeks, "--json")[1])["rows"]}

    assert find_nodes("1") == set()
    assert find_nodes("2") == {"n3", "n4", "n5", "n6", None}
    assert find_nodes("6") == {"n3", "n4", "n5", "n6", "n9", None}


def test_focus_rows_have_what_the_specification_wants(told):
    status, out, err = told("--focus")
    assert status == 0
    assert "1 row without a price left out" in err
    records = list(csv.DictReader(io.StringIO(out)))
    assert MANDATORY <= set(records[0]) == set(FOCUS_COLUMNS)
    custom = [name.startswith("x_") for name in out.splitlines()[0].split(",")]
    assert custom == sorted(custom), "custom columns come last"
    for record in records:
        assert {name for name in MANDATORY if not record[name]} <= NULLABLE
        numbers = {
            name: float(record[name])
            for name in record
            if name.endswith(("Cost", "Price", "Quantity")) and record[name]
        }
        assert numbers["BilledCost"] == 0, "the provider bills these GPUs already"
        for kind in ("List", "Contracted"):
            assert numbers[f"{kind}UnitPrice"] * numbers["PricingQuantity"] == pytest.approx(
                numbers[f"{kind}Cost"]
            )
        start, end = (
            dt.datetime.fromisoformat(record[name])
            for name in ("ChargePeriodStart", "ChargePeriodEnd")
        )
        assert (start, end - start) == (LAST, dt.timedelta(weeks=1))
    charged = {record["ResourceId"]: record for record in records}
    slow = charged["n3"]
    assert (slow["EffectiveCost"], slow["PricingQuantity"], slow["PricingUnit"]) == (
        "5.0",
        "2.0",
        "GPU-Hours",
    )
    assert (slow["ServiceProviderName"], slow["HostProviderName"], slow["SkuPriceId"]) == (
        "aws",
        "aws",
        "aws/NVIDIA L4",
    )
    assert (slow["x_JobId"], slow["x_Rank"], slow["x_RemediationActionCount"]) == ("77", "3", "1")
    unknown = charged["n6"]
    assert (unknown["ServiceProviderName"], unknown["HostProviderName"], unknown["SkuId"]) == (
        "Unknown",
        "",
        "any/any",
    )
    assert charged["n5"]["ChargeClass"] == "Correction"
    assert not charged[""]["ResourceType"]
    lines = [json.loads(line) for line in told("--focus=ndjson")[1].splitlines()]
    assert [
        {name: "" if value is None else str(value) for name, value in line.items()}
        for line in lines
    ] == records


def test_what_is_wrong_is_said_with_the_next_step(told, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("x" * 40)
    status, _, err = told(token_file=wrong)
    assert status == 1
    assert "does not know this bearer" in err
    assert "cannot be read" in told(token_file=tmp_path / "none")[2]
    assert "choose one" in told("--json", "--focus")[2]
    status, _, err = told("--url", "http://127.0.0.1:9")
    assert status != 0
    assert "no Echo answers at http://127.0.0.1:9" in err


def test_a_name_may_hold_what_other_texts_take_for_a_line_end(told):
    cost = CostRecord(
        gpu_seconds=60.0, attributed=CHARGED, node_id="n\x85\u2028x", rank=7, amount=1.0, **PAID
    )
    export = build_cost_records("c1", [cost], at_ns(LAST))
    assert push(told.echo, export, signal=Signal.LOGS).status_code == 200
    status, out, err = told("--focus=ndjson")
    assert status == 0, err
    assert "n\x85\u2028x" in {
        json.loads(line).get("ResourceId") for line in out.split("\n") if line
    }


def test_lines_of_json_need_no_more_than_ascii():
    text = write_ndjson([{"ResourceId": "n\udcff\u00e9"}])
    assert text.isascii()
    assert json.loads(text) == {"ResourceId": "n\udcff\u00e9"}

"""`ingero-echo report` of a running Echo: for people, as JSON and in FOCUS columns."""

import csv
import datetime as dt
import io
import json

import pytest
from tests.echo.service.conftest import ALL, push

from ingero.cli.main import run_program
from ingero.cli.programs.echo import cli
from ingero.cli.programs.echo_report import FOCUS_COLUMNS
from ingero.otlp.names import Signal
from ingero.wire.costs import CHARGED, UNATTRIBUTED, CostRecord, build_cost_records

NOW = dt.datetime.now(dt.UTC)
MONDAY = (NOW - dt.timedelta(days=NOW.weekday())).replace(hour=0, minute=0, second=0, microsecond=0)
LAST = MONDAY - dt.timedelta(weeks=1)
PAID = {"provider": "aws", "gpu_model": "NVIDIA L4", "currency": "USD"}
# FinOps FOCUS 1.2: what every record must have; ChargeClass alone may be null.
MANDATORY = {
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost",
    "EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName",
    "ServiceCategory", "ServiceName",
}  # fmt: skip


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
        (LAST, [CostRecord(gpu_seconds=-1.0, attributed=CHARGED, node_id="n5", rank=5, amount=-0.5, **PAID)]),
    ):  # fmt: skip
        export = build_cost_records("c1", costs, int(moment.timestamp()) * 10**9)
        assert push(echo, export, signal=Signal.LOGS).status_code == 200
    token = tmp_path / "token"
    token.write_text(ALL)

    def run(*arguments, token_file=token):
        status = run_program(
            cli, ["report", "--url", echo.url, "--token-file", str(token_file), *arguments]
        )
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_a_person_reads_each_week_and_whom_it_is_charged_to(told):
    status, out, _ = told()
    assert status == 0
    assert out.splitlines() == [
        f"week of {LAST:%Y-%m-%d}: 2.0 GPU-hours, 4.53 USD",
        "  c1 n3 rank 3: 2.0 GPU-hours, 5.00 USD",
        "  c1 nobody in particular: 36.0 GPU-seconds, 0.03 USD",
        "  c1 n4 rank 4: 9.0 GPU-seconds",
        "  c1 n5 rank 5: -1.0 GPU-seconds, -0.50 USD",
    ]


def test_weeks_are_whole_but_for_the_current_one(told):
    def find_nodes(weeks):
        return {row["node_id"] for row in json.loads(told("--weeks", weeks, "--json")[1])["rows"]}

    assert find_nodes("1") == set()
    assert find_nodes("2") == {"n3", "n4", "n5", None}
    assert find_nodes("6") == {"n3", "n4", "n5", "n9", None}


def test_focus_records_have_what_the_specification_wants(told):
    status, out, err = told("--focus")
    assert status == 0
    assert "1 row without a price left out" in err
    records = list(csv.DictReader(io.StringIO(out)))
    assert set(MANDATORY) <= set(records[0]) == set(FOCUS_COLUMNS)
    for record in records:
        assert {name for name in MANDATORY if not record[name]} <= {"ChargeClass"}
        assert float(record["BilledCost"]) == 0, "the provider bills these GPUs already"
        start, end = (
            dt.datetime.fromisoformat(record[name])
            for name in ("ChargePeriodStart", "ChargePeriodEnd")
        )
        assert (start, end - start) == (LAST, dt.timedelta(weeks=1))
    charged = {record["ResourceId"]: record for record in records}
    assert (charged["n3"]["EffectiveCost"], charged["n3"]["PricingQuantity"]) == ("5.0", "2.0")
    assert charged["n5"]["ChargeClass"] == "Correction"
    assert not charged[""]["ResourceType"]


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

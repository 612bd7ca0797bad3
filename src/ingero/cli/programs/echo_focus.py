"""What waiting cost, as rows of a FOCUS dataset for FinOps tools.

Source: FinOps Open Cost and Usage Specification 1.4, dataset Cost and Usage: every column that it wants without a
condition, those conditional ones that our rows can fill, and custom ones with ``x_``.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

_HOUR_S: Final = 3600.0
_UNIT: Final = "GPU-Hours"
FOCUS_COLUMNS: Final = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart",
    "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "ContractedUnitPrice", "EffectiveCost", "HostProviderName",
    "InvoiceIssuerName", "ListCost", "ListUnitPrice", "PricingQuantity", "PricingUnit", "ResourceId", "ResourceName",
    "ResourceType", "ServiceCategory", "ServiceName", "ServiceProviderName", "ServiceSubcategory", "SkuId", "SkuMeter",
    "SkuPriceDetails", "SkuPriceId", "x_AcceleratorModelName", "x_JobId", "x_Rank", "x_RemediationActionCount",
)  # fmt: skip


def build_focus(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of `fleet.cluster.cost_by_week` that have a price as FOCUS rows, the charged node as their resource.

    What is billed is 0: the provider bills the same GPUs. The SKU is the entry of the operator's price list.
    """
    for row in rows:
        if row["amount"] is None:
            continue
        start = datetime.fromisoformat(row["week"]).astimezone(UTC)
        begin, end = (_format_time(one) for one in (start, start + timedelta(weeks=1)))
        hours, amount = row["gpu_seconds"] / _HOUR_S, row["amount"]
        node, provider = row["node_id"], row["provider"]
        whom = node or "no node in particular"
        sku = f"{provider or 'any'}/{row['gpu_model'] or 'any'}"
        yield {
            "BilledCost": 0,
            "BillingAccountId": row["cluster_id"], "BillingAccountName": row["cluster_id"],
            "BillingCurrency": row["currency"], "BillingPeriodEnd": end, "BillingPeriodStart": begin,
            "ChargeCategory": "Usage", "ChargeClass": "Correction" if amount < 0 else None,
            "ChargeDescription": f"GPUs that waited for {whom}, part of their provider's bill",
            "ChargeFrequency": "Usage-Based", "ChargePeriodEnd": end, "ChargePeriodStart": begin,
            "ConsumedQuantity": hours, "ConsumedUnit": _UNIT,
            "ContractedCost": amount, "ContractedUnitPrice": amount / hours, "EffectiveCost": amount,
            "HostProviderName": provider, "InvoiceIssuerName": "Ingero",
            "ListCost": amount, "ListUnitPrice": amount / hours, "PricingQuantity": hours, "PricingUnit": _UNIT,
            "ResourceId": node, "ResourceName": node, "ResourceType": "Node" if node else None,
            "ServiceCategory": "Compute", "ServiceName": "Waiting for slow ranks",
            "ServiceProviderName": provider or "Unknown", "ServiceSubcategory": "Other (Compute)",
            "SkuId": sku, "SkuMeter": "GPU time", "SkuPriceDetails": None, "SkuPriceId": sku,
            "x_AcceleratorModelName": row["gpu_model"], "x_JobId": row["job"], "x_Rank": row["rank"],
            "x_RemediationActionCount": row["n_actions"],
        }  # fmt: skip


def write_csv(records: Iterable[Mapping[str, Any]]) -> str:
    """With a header; null is an empty field, as FOCUS wants it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FOCUS_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def write_ndjson(records: Iterable[Mapping[str, Any]]) -> str:
    """An object a line, in ASCII: it stays JSON whatever the output's encoding is."""
    return "".join(f"{json.dumps(record)}\n" for record in records)


FOCUS_FORMATS: Final = {"csv": write_csv, "ndjson": write_ndjson}


def _format_time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

"""What clusters on AWS cost: an estimate by the price table in prices.json, which names its source and date."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fever.job import JobFolder
from fever.launch.aws import resources

if TYPE_CHECKING:
    from fever.launch.aws.target import Aws

SEEN = "instances.json"  # in a cluster's record: its instances as they were last seen, since AWS forgets them
HOURS = 730  # of a month, by which disks are paid


@cache
def price_table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("prices.json").read_text())


def price(region: str, kind: str, spot: bool, disk: int) -> float | None:
    """USD per hour of an instance with its disk in GB; None if the table has no price for it."""
    table = price_table()
    place = table["regions"].get(region, {"types": {}, "families": {}, "disk": 0.0})
    family, _, size = kind.partition(".")
    whole = place["types"].get(kind)
    if whole is None and family in place["families"] and size in table["sizes"]:
        whole = place["families"][family] * table["sizes"][size]
    if whole is None:
        return None
    return round(whole * (table["spot_share"] if spot else 1.0) + disk * place["disk"] / HOURS, 4)


def source() -> str:
    """Where prices are from, as part of a sentence."""
    table = price_table()
    return f"{table['source']}, {table['date']}; {table['note']}"


def bill(target: Aws, folder: Path, id: str | None) -> dict[str, Any]:
    """The instances of a cluster, their hours, and their cost. `id`: the cluster's; None if it has nothing.

    AWS forgets instances about an hour after their end. Those that were seen before, here or by `fever status`, count
    until then; those that an autoscaler launched and ended without being seen are missing.
    """
    rows: dict[str, Any] = {}
    if id is not None:
        files = JobFolder(folder)
        rows = files.read(SEEN) or {}
        for row in rows.values():
            row["state"] = "ended"
        for row in resources.list_instances(resources.connect(target.region), fever_id=id):
            rows[row["InstanceId"]] = _account(target, row)
        files.write(SEEN, rows)
    instances = sorted(rows.values(), key=lambda row: (row["role"], row["launched"]))
    return {
        "region": target.region,
        "instances": instances,
        "hours": round(sum(row["hours"] for row in instances), 4),
        "estimate": round(sum(row["hours"] * (row["price"] or 0.0) for row in instances), 4),  # USD
        "unknown": sorted({row["type"] for row in instances if row["price"] is None}),  # which the estimate leaves out
        "prices": price_table()["date"],
        "source": source(),
    }


def _account(target: Aws, row: dict[str, Any]) -> dict[str, Any]:
    """One instance: its hours, and its price per hour with its disk."""
    ended = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", row.get("StateTransitionReason") or "")
    living = row["State"]["Name"] in resources.LIVING
    until = datetime.fromisoformat(f"{ended[1]}+00:00") if ended and not living else datetime.now(UTC)
    spot = row.get("InstanceLifecycle") == "spot"
    return {
        "id": row["InstanceId"],
        "type": row["InstanceType"],
        "state": row["State"]["Name"],
        "role": resources.tags_of(row).get("ray-node-type", "worker"),
        "spot": spot,
        "launched": row["LaunchTime"].isoformat(),
        "hours": round(max((until - row["LaunchTime"]).total_seconds(), 0.0) / 3600, 4),
        "price": price(target.region, row["InstanceType"], spot, target.disk),
    }


def describe_bill(cost: dict[str, Any]) -> str:
    """A bill as one sentence, without a full stop."""
    kinds = f", without {', '.join(cost['unknown'])}, whose price is unknown" if cost["unknown"] else ""
    count = len(cost["instances"])
    of = f"{count} instance{'s' if count != 1 else ''}, {cost['hours']:.1f} h together"
    return f"about {cost['estimate']:.2f} USD{kinds} ({of}; {cost['source']})"


def describe_plan(target: Aws, name: str, image: str) -> list[str]:
    """What `fever up` would make, and its price per hour, line by line."""
    workers, disk = target.workers, target.disk
    least = workers.count if workers.least is None else workers.least
    head = price(target.region, target.head, False, disk)
    each = price(target.region, workers.type, workers.spot, disk)
    where = target.allow or "this machine's address"
    lines = [
        f"{name}: fever up would make in {target.region}, of image {image}",
        f"  head     {target.head}, {disk} GB: {_per_hour(head)}",
        f"  workers  {workers.count} x {workers.type}{', spot' if workers.spot else ''}, {disk} GB: "
        f"{_per_hour(each)} each; {least} stay when nothing runs",
        f"  and      role, key pair and security group, which cost nothing; ssh from {where}",
    ]
    if head is None or (each is None and workers.count):
        return [*lines, f"what it costs is unknown, for want of a price ({source()})"]
    most, rest = head + workers.count * (each or 0.0), head + least * (each or 0.0)
    idle = f", {rest:.2f} USD/h when nothing runs" if least < workers.count else ""
    return [*lines, f"about {most:.2f} USD/h while it trains{idle}, until fever down ({source()})"]


def _per_hour(price: float | None) -> str:
    return "price unknown" if price is None else f"{price:.3f} USD/h"

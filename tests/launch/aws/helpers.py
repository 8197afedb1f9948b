"""Settings of a small cluster on AWS."""

from __future__ import annotations

from typing import Any

from fever.config import validate
from fever.launch.aws.target import Aws
from tests.lab.cloud import REGION

VALUES: dict[str, Any] = {
    "region": REGION,
    "head": "m5.large",
    "workers": {"type": "m5.large", "count": 2, "spot": True},
    "allow": "1.2.3.4/32",
}


def make_target(**more: Any) -> Aws:
    return validate(Aws, {**VALUES, **more}, "cloud.yaml")

from __future__ import annotations

from typing import Any


def test_doctor_examines_this_machine(fever: Any) -> None:
    done = fever("doctor")
    assert done.returncode == 0, done.stdout
    for topic in ("python", "jax", "cores", "memory", "accelerator", "mujoco"):
        assert topic in done.stdout


def test_doctor_reports_traps(fever: Any) -> None:
    done = fever("doctor", RAY_ADDRESS="auto", OMP_NUM_THREADS="4")
    assert "RAY_ADDRESS" in done.stdout
    assert "OMP_NUM_THREADS" in done.stdout


def test_doctor_knows_every_extra() -> None:
    from importlib.metadata import metadata

    from fever.launch.doctor import OPTIONAL, _options

    extras = set(metadata("fever").get_all("Provides-Extra") or ())
    assert {extra for extra, _ in OPTIONAL.values()} == extras - {"cluster", "dev"}
    assert [finding.topic for finding in _options()] == list(OPTIONAL)

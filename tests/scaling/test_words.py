"""What the report says: yes, no, noise; the bottleneck; what to mind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fever.scaling import report, words
from fever.scaling.figures import collect, interval, verdict
from fever.scaling.measure import Measurement
from fever.scaling.model import Setting
from tests.scaling.synthetic import figures, plan, waits_for_learner

SHARES = {"time_env": 0.2, "time_inference": 0.2, "time_transfer": 0.2, "time_learn": 0.4}
Rates = dict[int, tuple[float, dict[str, float]]]


def law(*counts: int, **parts: float) -> Rates:
    return {count: waits_for_learner(count, **parts) for count in counts}


def flat(**rates: float) -> Rates:
    return {int(name[1:]): (rate, SHARES) for name, rate in rates.items()}


def test_a_speedup_is_a_yes_with_its_interval() -> None:
    found = figures(law(1, 2, 4))
    assert words.answer(found) == "yes: 4 workers are 3.74 times as fast as 1 (3.74 to 3.74)"
    assert found.enough().count == 4


def test_more_that_is_slower_is_a_no() -> None:
    found = figures(flat(n0=1000, n1=800, n2=600))
    assert words.answer(found) == (
        "no: more workers make this slower: 2 workers are 0.60 times as fast as one process (0.60 to 0.60)"
    )


def test_beyond_the_cores_nothing_is_gained() -> None:
    found = figures(law(1, 2, 4, computing=1.0), setting=Setting(False, 2, 1.0))
    assert "yes: " in words.answer(found)
    assert words.answer(found).endswith("; beyond 2 workers nothing is gained")
    assert words.bottleneck(found).startswith("at 4 workers it is the number of cores; to change that: more machines")


def test_a_gain_beyond_is_denied_only_if_the_interval_does() -> None:
    assert words.answer(noisy({1: [100, 100, 100], 2: [200, 201, 199], 4: [200, 199, 201]})).endswith(
        "; beyond 2 workers nothing is gained"
    )
    assert words.answer(noisy({1: [100, 100, 100], 2: [200, 201, 199], 4: [280, 190, 300]})).endswith(
        "; beyond 2 workers a gain cannot be told from the noise"
    )


def test_a_wide_interval_has_few_digits() -> None:
    found = noisy({1: [100, 100, 100], 2: [5, 100, 2000]})
    assert words.answer(found) == (
        "no difference beyond the noise: 2 workers are 1.00 times as fast as 1 (0.0006 to 2,000)"
    )


def test_a_model_of_few_numbers_is_not_praised() -> None:
    assert "with one number of workers to fit it to, predictions are guesses" in report.model_words(figures(law(0, 2)))
    assert "two numbers of workers always fit: a third one shows" in report.model_words(figures(law(0, 1, 2)))
    assert "fitted without 4, it is " in (text := report.model_words(figures(law(1, 2, 4))))
    assert "guesses" not in text
    assert "always" not in text


def noisy(rates: dict[int, list[float]]) -> Any:
    found = [
        Measurement(count, number, "run", workers=count, samples_per_second=rate, shares=SHARES)
        for count, each in rates.items()
        for number, rate in enumerate(each, 1)
    ]
    return collect(plan(*rates), Setting(False, 2), found)


def test_a_difference_within_the_noise_is_called_that() -> None:
    found = noisy({1: [100, 130, 90], 2: [125, 95, 120]})
    assert words.answer(found).startswith("no difference beyond the noise: 2 workers are 1.07 times as fast as 1 (")
    assert "noise" in words.speedup_words(found, found.counts[1])


def test_a_count_of_one_round_is_not_passed_over() -> None:
    """After Ctrl-C in the second round."""
    found = words.answer(noisy({1: [100, 130], 2: [110, 115], 4: [390]}))
    assert found.startswith("no difference beyond the noise: 2 workers are ")
    assert found.endswith("in one round only, which says nothing of noise: 4 workers are 3.90 times as fast as 1")
    assert "in one round" not in words.answer(noisy({1: [100, 101], 2: [200, 201]}))


def test_what_slows_the_machine_in_one_round_slows_all_counts() -> None:
    """Compared within rounds, the counts differ clearly although the rounds do more."""
    assert words.answer(noisy({1: [100, 50, 10], 2: [150, 76, 15]})).startswith("yes: 2 workers are 1.51 times")


def test_one_round_says_nothing_of_noise() -> None:
    found = figures(flat(n1=100, n2=190), rounds=1)
    assert words.answer(found) == "one round only: 2 workers are 1.90 times as fast as 1; --rounds 3 tells noise"
    assert verdict(found.counts[1], found.base) == "one round"


def test_a_count_that_failed_in_all_rounds_but_one_does_not_decide_the_answer() -> None:
    found = noisy({1: [100, 101, 99], 2: [195, 200, 190], 4: [210]})
    assert words.answer(found).startswith("yes: 2 workers are 1.95 times as fast as 1 (")
    assert words.answer(noisy({1: [100, 101, 99], 2: [200]})).startswith("one round only: 2 workers are 2.00 times")


def test_a_speedup_is_that_of_the_rounds_of_its_interval() -> None:
    """In the round that one count lacks, the machine was ten times as slow."""
    found = noisy({1: [100, 102, 10], 2: [190, 200]})
    assert words.speedup_words(found, found.counts[1]).startswith("1.93 (")
    assert found.measured_speedup(found.base) == 1


def test_intervals_are_students() -> None:
    found = interval([1.0, math.e, math.e**2])
    assert found is not None
    assert found[1] == pytest.approx(math.exp(1 + 4.3027 / math.sqrt(3)), rel=1e-3)
    assert interval([2.0]) is None


def test_the_environment_is_the_bottleneck_and_the_learner_the_next() -> None:
    found = figures(law(1, 2, 4, learner=1e-4, transfer=0.0, cores=64), setting=Setting(False, 64, 0.0))
    said = words.bottleneck(found)
    assert said.startswith("at 4 workers it is the environment (9")
    assert "the next one, at about 64 workers, is the learner; to change that: less work per sample" in said


def test_transfer_between_machines_is_the_networks() -> None:
    found = figures(law(1, 2, 4, env=1e-4, transfer=1e-3), setting=Setting(False), kind="nodes", place={"on": "slurm"})
    assert words.bottleneck(found).startswith("at 4 nodes it is the network (9")
    assert "nodes  environment  inference  network  learner" in "\n".join(report.lines(found, [8], None))


def test_different_work_per_sample_is_said() -> None:
    (note, *_) = words.notes(figures(law(1, 2, 4)), None)
    assert note == (
        "the policy is renewed every 1,024 samples with 1 worker, every 4,096 with 4: as many samples may teach less; "
        "--target measures learning"
    )


def test_what_failed_and_a_busy_machine_are_said() -> None:
    failed = Measurement(4, 1, "run", "worker 3 died")
    found = noisy({1: [100, 100, 100], 2: [190, 190, 190]})
    found = collect(plan(1, 2, 4), found.setting, [*(run for one in found.counts for run in one.rounds), failed])
    said = words.notes(found, 1.9)
    assert "4 workers failed: worker 3 died" in said
    assert "the machine was busy before it began (load 1.9 on 2 cores): repeat it when idle" in said
    assert "4 workers share 2 cores" in said
    assert [one.count for one in found.counts] == [1, 2]


def test_a_target_that_is_not_reached_is_said() -> None:
    found = figures(law(1, 2), target=475.0)
    assert words.notes(found, None)[-1] == (
        "the return 475.0 was not reached within 10m 00s in some runs (1 worker: 3 of 3, 2 workers: 3 of 3)"
    )


def test_the_report_has_everything_in_all_forms(tmp_path: Path) -> None:
    found = figures(law(0, 1, 2, 4), setting=Setting(False, 2, 0.0))
    facts = report.write(found, [8, 16], tmp_path, True, 0.1)
    assert [one["count"] for one in facts["counts"]] == [0, 1, 2, 4]
    assert [one["count"] for one in facts["predicted"]] == [8, 16]
    assert facts["predicted"][0]["samples_per_second"] == pytest.approx(waits_for_learner(8)[0], rel=0.02)
    assert all(abs(one["error"]) < 0.02 for one in facts["counts"][1:])
    assert abs(facts["model"]["held_out_error"]) < 0.02
    page = (tmp_path / "report.md").read_text()
    assert "| 8 |" in page
    assert "predicted" in page
    assert "![speedup](speedup.svg)" in page
    printed = report.lines(found, [8, 16], 0.1)
    assert printed[0].split() == ["workers", "samples/s", "updates/s", "speedup", "efficiency", "model"]
    assert max(map(len, printed[:7])) <= 80


def test_names_of_others_are_no_markup(tmp_path: Path) -> None:
    config = plan(1, 2).config.model_copy(update={"env": "my_envs:A<b>|*x*$y$\x1b[31m"})
    report.write(figures(law(1, 2), config=config), [4], tmp_path, True, None)
    assert "my\\_envs:A\\<b\\>\\|\\*x\\*\\$y\\$" in (tmp_path / "report.md").read_text()
    assert "\x1b" not in (tmp_path / "report.md").read_text()

"""Comparisons of run directories: who is better, when nobody can tell, and what is said of runs that do not fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fever import layout
from fever.errors import FeverError
from fever.experiments.compare import Report, compare, parse_scale
from fever.experiments.figure import Look, draw
from fever.experiments.report import lines
from fever.experiments.select import find_groups
from fever.runs.run import list_runs
from tests.experiments.made import make_experiment, make_run
from tests.helpers import call_fever


def flat(*tops: float, rows: int = 10) -> list[list[float]]:
    """Learning curves that rise to these returns in half of their rows, and stay there."""
    shape = np.minimum(1, np.arange(1, rows + 1) / (rows / 2))
    return [list(top * shape) for top in tops]


def compared(words: Sequence[str | Path], folder: Path, *scale: str) -> Report:
    return compare(find_groups(words, folder), parse_scale(scale))


def text(report: Report) -> str:
    return "\n".join(lines(report))


def test_a_clear_win(tmp_path: Path) -> None:
    make_experiment(tmp_path, "weak", flat(100, 110, 120), settings={"gamma": 0.9})
    make_experiment(tmp_path, "strong", flat(200, 210, 220, 230), settings={"gamma": 0.99})
    report = compared(["weak-seed-0", "strong-seed-3"], tmp_path)
    assert report.groups["strong"] == [str(tmp_path / f"strong-seed-{seed}") for seed in range(4)]
    [found] = report.environments
    assert (found.env, found.metric, found.steps) == ("CartPole-v1", "return_mean", 1000)
    scores = found.scores["strong"]["final"]
    assert (scores.values, scores.mean, scores.iqm) == ([200, 210, 220, 230], 215, 215)
    assert scores.interval is not None
    assert 200 <= scores.interval[0] < 215 < scores.interval[1] <= 230
    final, area = found.comparisons
    assert (final.measure, final.difference, final.probability, final.verdict) == ("final", 105, 1, "better")
    assert final.interval is not None
    assert final.interval[0] > 0
    assert area.verdict == "better"
    assert report.differences == {"gamma": ["0.9", "0.99"]}
    assert report.notes == []
    assert "strong against weak: final score +105.0 (" in text(report)
    assert text(report).count("strong is better") == 2
    assert "they differ in one setting:\n         weak  strong\n  gamma  0.9   0.99" in text(report)
    back = compared(["strong-seed-0", "weak-seed-0"], tmp_path).environments[0].comparisons[0]
    assert (back.difference, back.probability, back.verdict) == (-105, 0, "worse")


def test_the_area_is_the_mean_over_the_steps_so_far(tmp_path: Path) -> None:
    """One that learns sooner is better by it, though both end alike."""
    make_experiment(tmp_path, "late", [[0, 0, 0, 100], [0, 0, 0, 101], [0, 0, 0, 102]])
    make_experiment(tmp_path, "soon", [[0, 100, 100, 100], [0, 101, 101, 101], [0, 102, 102, 102]], algo="a2c")
    final, area = compared(["late-seed-0", "soon-seed-0"], tmp_path).environments[0].comparisons
    assert (final.difference, final.verdict) == (0, "unknown")
    assert area.difference == pytest.approx(101 * (0.625 - 0.125))
    assert area.verdict == "better"
    scores = compared(["late-seed-0", "soon-seed-0"], tmp_path).environments[0].scores["late"]["area"]
    assert scores.values == pytest.approx([100 / 2 / 4, 101 / 2 / 4, 102 / 2 / 4])  # a triangle over the last 100 steps


def test_not_enough_seeds_to_tell(tmp_path: Path) -> None:
    make_experiment(tmp_path, "one", flat(100, 200, 300))
    make_experiment(tmp_path, "two", flat(130, 220, 320), algo="a2c")
    report = compared(["one-seed-0", "two-seed-0"], tmp_path)
    final = report.environments[0].comparisons[0]
    assert (final.verdict, final.difference) == ("unknown", pytest.approx(70 / 3))
    assert final.seeds_needed is not None
    assert final.seeds_needed > 100
    said = f"not enough seeds to tell (3 and 3); a difference of this size needs about {final.seeds_needed} on each"
    assert said in text(report)


def test_two_seeds_on_a_side_never_tell(tmp_path: Path) -> None:
    make_experiment(tmp_path, "one", flat(100, 101))
    make_experiment(tmp_path, "two", flat(900, 901, 902), algo="a2c")
    report = compared(["one-seed-0", "two-seed-0"], tmp_path)
    assert report.environments[0].comparisons[0].verdict == "unknown"
    assert "not enough seeds to tell (3 and 2); a difference of this size needs about 3 on each side" in text(report)


def test_single_runs_have_no_intervals(tmp_path: Path) -> None:
    make_run(tmp_path, "a", [1, 2, 3])
    make_run(tmp_path, "b", [1, 2, 9], algo="a2c")
    report = compared(["a", "b"], tmp_path)
    assert report.environments[0].comparisons[0].interval is None
    assert "b against a: final score +6.0, probability of improvement 1.0: not enough seeds to tell (1 and 1); at " in (
        text(report)
    )
    json.dumps(report.as_json())


def test_equal_scores_are_no_difference(tmp_path: Path) -> None:
    for name, algo in (("a", "ppo"), ("b", "a2c")):
        make_experiment(tmp_path, name, [[500, 500]] * 3, algo=algo)
    report = compared(["a-seed-0", "b-seed-0"], tmp_path)
    assert report.environments[0].comparisons[0].verdict == "same"
    assert "no difference: every run has the same score" in text(report)


def test_runs_that_stopped_at_their_goal_keep_it(tmp_path: Path) -> None:
    make_experiment(tmp_path, "quick", [[100, 475], [50, 475], [0, 475]], reason="reward")
    make_experiment(tmp_path, "slow", flat(300, 310, 320), algo="a2c")
    report = compared(["quick-seed-0", "slow-seed-0"], tmp_path)
    [found] = report.environments
    assert found.steps == 1000
    assert found.scores["quick"]["final"].values == [475, 475, 475]
    assert found.scores["quick"]["area"].values[0] == pytest.approx((100 * 100 + 287.5 * 100 + 475 * 800) / 1000)
    assert "3 of 6 runs stopped at their goal, and count with their last score from there on" in report.notes[0]


def test_unequal_budgets_are_compared_at_the_steps_that_all_have(tmp_path: Path) -> None:
    make_experiment(tmp_path, "short", flat(100, 110, 120))
    make_experiment(tmp_path, "long", [[1] * 10 + [900] * 20] * 3, algo="a2c")
    report = compared(["short-seed-0", "long-seed-0"], tmp_path)
    [found] = report.environments
    assert (found.steps, found.scores["long"]["final"].mean) == (1000, 1)
    assert "compared at 1.0k steps, where" in report.notes[0]
    assert "long-seed-0 has 3.0k" in report.notes[0]


def test_evaluations_are_the_score_if_all_have_them(tmp_path: Path) -> None:
    for name, algo in (("a", "ppo"), ("b", "a2c")):
        for seed in range(3):
            scores = [10.0 * seed, 20.0 + seed]
            make_run(tmp_path, f"{name}{seed}", [7, 7], seed=seed, algo=algo, evaluations=scores, eval_every=100)
    assert compared(["a0", "b0"], tmp_path).environments[0].metric == "eval/return_mean"
    assert compared(["a0", "b0"], tmp_path).environments[0].scores["a0 and 2 more"]["final"].values == [20, 21, 22]
    make_experiment(tmp_path, "c", [[7, 8]], algo="td3")
    assert compared(["a0", "c-seed-0"], tmp_path).environments[0].metric == "return_mean"


def test_a_run_without_episodes_and_a_damaged_one_are_left_out(tmp_path: Path) -> None:
    make_experiment(tmp_path, "a", [*flat(1, 2, 3), []])
    make_experiment(tmp_path, "b", flat(4, 5, 6, 7), algo="a2c")
    (tmp_path / "b-seed-3" / layout.SUMMARY).write_text("{")
    (tmp_path / "b-seed-1" / layout.METRICS).write_text('{"iteration": 1, "steps": 1e400, "return_mean": 2}\nno row\n')
    report = compared(["a-seed-0", "b-seed-0"], tmp_path)
    assert [len(paths) for paths in report.environments[0].runs.values()] == [3, 2]
    assert f"left out: {tmp_path}/a-seed-3 has no finished episode yet" in report.notes
    assert f"left out: {tmp_path}/b-seed-1 has no finished episode yet" in report.notes
    assert any("summary.json is missing or damaged" in note for note in report.notes)
    (tmp_path / "a-seed-1" / layout.CONFIG).write_text("env: [")
    report = compared([f"{tmp_path}/a*", "b-seed-0"], tmp_path)
    assert any("a-seed-1/config.yaml is not YAML" in note for note in report.notes)
    assert len(report.groups[f"{tmp_path}/a*"]) == 3


def test_a_side_without_any_score_is_one_sentence(tmp_path: Path) -> None:
    make_experiment(tmp_path, "a", [[]])
    make_experiment(tmp_path, "b", flat(4), algo="a2c")
    with pytest.raises(
        FeverError, match=r"no run of a-seed-0 has a score in CartPole-v1; left out: .* no finished episode"
    ):
        compared(["a-seed-0", "b-seed-0"], tmp_path)


def test_different_environments_are_not_compared(tmp_path: Path) -> None:
    make_experiment(tmp_path, "a", flat(1, 2, 3))
    make_experiment(tmp_path, "b", flat(1, 2, 3), env="Pendulum-v1")
    with pytest.raises(FeverError, match="no environment in common: CartPole-v1, Pendulum-v1"):
        compared(["a-seed-0", "b-seed-0"], tmp_path)


def several_environments(folder: Path) -> list[str]:
    for algo, bonus in (("ppo", 0), ("a2c", 40)):
        make_experiment(folder, f"{algo}-cart", flat(100 + bonus, 110 + bonus, 120 + bonus), algo=algo)
        pendulum = flat(-1000 + bonus, -900 + bonus, -800 + bonus)
        make_experiment(folder, f"{algo}-pendulum", pendulum, algo=algo, env="Pendulum-v1")
    return [f"{folder}/ppo-*", f"{folder}/a2c-*"]


def test_over_several_environments_what_has_no_unit_is_averaged(tmp_path: Path) -> None:
    report = compared(several_environments(tmp_path), tmp_path)
    assert report.overall is not None
    assert report.overall.scores == {}
    first, second = report.groups
    chance, interval = report.overall.probability[second]["final"]
    assert chance == pytest.approx((1 + 6 / 9) / 2)  # 960, 860, 760 win 1 + 2 + 3 times of nine
    assert interval is not None
    assert report.overall.ranks == {
        first: {"final": pytest.approx(1 + chance), "area": pytest.approx(1 + chance)},
        second: {"final": pytest.approx(2 - chance), "area": pytest.approx(2 - chance)},
    }
    assert any("different units and are not averaged" in note for note in report.notes)
    assert "all 2 environments: CartPole-v1, Pendulum-v1" in text(report)


def test_scores_are_averaged_on_a_scale_that_is_given(tmp_path: Path) -> None:
    words = several_environments(tmp_path)
    report = compared(words, tmp_path, "CartPole-v1=100,200", "Pendulum-v1=-1000,0")
    assert report.overall is not None
    scores = report.overall.scores[words[0]]["final"]
    assert scores.values == pytest.approx([0, 0.1, 0.2, 0, 0.1, 0.2])
    assert scores.iqm == pytest.approx(0.1)
    assert "interquartile mean on the scale" in text(report)
    with pytest.raises(FeverError, match="--scale Ant-v5: it is not among the environments: CartPole-v1, Pendulum-v1"):
        compared(words, tmp_path, "Ant-v5=0,1")


@pytest.mark.parametrize(
    "word", ["CartPole-v1", "CartPole-v1=3", "a=1,1", "a=0,x", "=0,1", "a=0,1,2", "a=nan,1", "a=0,1e999"]
)
def test_a_scale_that_is_none_is_one_sentence(word: str) -> None:
    with pytest.raises(FeverError, match="write ENV=LOW,HIGH"):
        parse_scale([word])


def test_words_that_mean_the_same_experiment_count_once(tmp_path: Path) -> None:
    make_experiment(tmp_path, "a", flat(1, 2, 3))
    make_experiment(tmp_path, "b", flat(3, 4, 5), algo="a2c")
    everything = sorted(tmp_path.iterdir())  # as a shell makes it of `runs/*`
    assert [group.name for group in find_groups(everything)] == ["a", "b"]
    with pytest.raises(FeverError, match="name two experiments to compare; all that was named is a"):
        compared(["a-seed-0", "a-seed-1"], tmp_path)
    with pytest.raises(FeverError, match=r"a-seed-1 is in both a and .*; a run can be on one side only"):
        compared(["a-seed-0", f"{tmp_path}/*-seed-1"], tmp_path)
    with pytest.raises(FeverError, match="no run matches z"):
        compared(["z*", "a-seed-0"], tmp_path)


def test_a_pattern_that_mixes_experiments_is_said(tmp_path: Path) -> None:
    make_experiment(tmp_path, "a", flat(1, 2), envs=4)
    make_experiment(tmp_path, "ab", flat(1, 2), envs=8)
    make_experiment(tmp_path, "b", flat(3, 4, 5), algo="a2c", envs=4)
    report = compared([f"{tmp_path}/a*", "b-seed-0"], tmp_path)
    assert any("has runs of 2 experiments in CartPole-v1, which count as if only" in note for note in report.notes)
    assert report.differences == {"algo": ["ppo", "a2c"], "envs": ["4, 8", "4"]}


def test_runs_of_one_seed_are_one_sample(tmp_path: Path) -> None:
    """Trained again, a seed gives the same scores: with them, two seeds would look like eight that agree."""
    for again in range(4):
        make_experiment(tmp_path, f"a-{again}", [[1] * (10 + again), [2] * (10 + again)])
    make_experiment(tmp_path, "b", flat(4, 5, 6), algo="a2c")
    report = compared(["a-0-seed-0", "b-seed-0"], tmp_path)
    (env,) = report.environments
    (name,) = (name for name in env.runs if name != "b")
    assert [Path(path).name for path in env.runs[name]] == ["a-3-seed-0", "a-3-seed-1"]
    assert env.comparisons[0].verdict == "unknown"
    same = [note for note in report.notes if "the same seed as" in note]
    assert len(same) == 6
    assert same[0].endswith(f"a-2-seed-0 has the same seed as {tmp_path}/a-3-seed-0, and the same settings")
    figure, notes = draw(list_runs(tmp_path), Look(by="algo"))
    assert len(notes) == 6
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a2c (3 runs)", "ppo (2 runs)"]


def test_a_search_is_named_by_its_runs(tmp_path: Path) -> None:
    make_run(tmp_path, "a", [1], search={"space": {"gamma": "uniform(0.9,1)"}})
    with pytest.raises(FeverError, match=r"a is a search; its runs are .*/a/trials/\*"):
        find_groups(["a"], tmp_path)


def test_the_command(tmp_path: Path) -> None:
    make_experiment(tmp_path / "runs", "a\x1b[31m", flat(1, 2, 3))
    make_experiment(tmp_path / "runs", "b", flat(8, 9, 10), algo="a2c", env_kwargs={"text": "\x1b[2J[red]"})
    names = [path.name for path in sorted((tmp_path / "runs").iterdir())]
    done = call_fever("compare", names[0], "b-seed-0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "b is better" in done.stdout
    assert "runs/b-seed-0, runs/b-seed-1, runs/b-seed-2" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    done = call_fever("compare", names[0], "b-seed-0", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["environments"][0]["comparisons"][0]["verdict"] == "better"
    for words in (["b-seed-0"], ["b-seed-0", "nowhere"]):
        done = call_fever("compare", *words, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)

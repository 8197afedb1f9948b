"""Pictures over seeds: what is in them, that they are the same each time, and that nobody's text is obeyed."""

from __future__ import annotations

import json
import time
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from fever import layout
from fever.errors import FeverError
from fever.experiments.figure import Look, draw, in_order
from fever.experiments.values import Values
from fever.job import RECORD
from fever.runs.plot import COLOURS, save
from fever.runs.run import Run
from tests.experiments.made import make_experiment, make_run
from tests.helpers import call_fever
from tests.runs.test_plot import EVIL


def two_algorithms(folder: Path, **more: Any) -> list[Run]:
    ppo = make_experiment(folder, "ppo", [[0, 10 * seed, 100 + seed] for seed in range(3)], algo="ppo", **more)
    return [*ppo, *make_experiment(folder, "a2c", [[0, 5, 50], [0, 7, 60]], algo="a2c", **more)]


def legend(figure: Any) -> list[str]:
    found = [axis.get_legend() for axis in figure.axes if axis.get_legend()] or figure.legends
    return [text.get_text() for one in found for text in one.get_texts()]


def test_one_mean_curve_with_its_band_for_each_algorithm(tmp_path: Path) -> None:
    figure, notes = draw(two_algorithms(tmp_path), Look(by="algo"))
    [axis] = figure.axes
    assert notes == []
    assert legend(figure) == ["a2c (2 runs)", "ppo (3 runs)"]
    means = [line.get_ydata() for line in axis.lines]
    assert [len(axis.lines), len(axis.collections)] == [2, 2]
    assert means[0][-1] == pytest.approx(55)
    assert means[1][-1] == pytest.approx(101)
    assert [line.get_color() for line in axis.lines] == list(COLOURS[:2])
    band = axis.collections[1].get_paths()[0].vertices
    ends = band[band[:, 0] == 300, 1]
    assert 100 <= ends.min() < 101 < ends.max() <= 102
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("environment steps", "return per episode")


def test_a_single_experiment_shows_its_runs_behind_the_mean(tmp_path: Path) -> None:
    figure, _ = draw(two_algorithms(tmp_path)[:3], Look())
    assert len(figure.axes[0].lines) == 4
    assert legend(figure) == ["ppo (3 runs)"]


def test_a_single_run_has_no_band(tmp_path: Path) -> None:
    figure, _ = draw([make_run(tmp_path, "a", [1, 2, 3])], Look(by="run"))
    assert [len(figure.axes[0].lines), len(figure.axes[0].collections)] == [1, 0]


def test_a_grid_has_a_panel_for_each_pair_of_values(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, f"{nodes}-{workers}-{seed}", [0, nodes * workers], seed=seed, workers=workers)
        for nodes in (1, 2) for workers in (2, 10, 4) for seed in range(2)
    ]  # fmt: skip
    for run in runs:
        nodes = int(run.path.name[0])
        run.job.mkdir()
        (run.job / RECORD).write_text(json.dumps({"target": {"nodes": nodes, "cpus_per_node": 8}}))
    figure, _ = draw(runs, Look(by="algo", rows="nodes", columns="workers"))
    assert [axis.get_title(loc="left") for axis in figure.axes[:3]] == ["workers 2", "workers 4", "workers 10"]
    assert [axis.get_ylabel().splitlines()[0] for axis in figure.axes[::3]] == ["nodes 1", "nodes 2"]
    last = [[line.get_ydata()[-1] for line in axis.lines][-1] for axis in figure.axes]
    assert last == [2, 4, 10, 4, 8, 20]
    values = Values(runs)
    assert (values.of(runs[0], "cpus"), values.of(runs[0], "stop.window")) == ("8", "20")
    sized = make_run(tmp_path, "sized", [1], env_kwargs={"size": 9})
    values = Values([*runs, sized])
    values.require("env_kwargs.size", "--by")
    assert [values.of(run, "env_kwargs.size") for run in (sized, runs[0])] == ["9", "default"]
    assert legend(figure) == ["ppo (2 runs)"]


def test_a_cell_without_runs_keeps_the_labels_of_its_row_and_column(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, f"{envs}-{workers}", [0, 1], envs=envs, workers=workers)
        for envs, workers in ((1, 2), (1, 4), (2, 2), (4, 4))
    ]
    figure, _ = draw(runs, Look(by="algo", rows="envs", columns="workers"))
    figure.canvas.draw()
    cells = {place: axis for place, axis in enumerate(figure.axes)}
    empty = [place for place, axis in cells.items() if [text.get_text() for text in axis.texts] == ["no run"]]
    assert empty == [3, 4]
    assert all(cells[place].axison for place in empty)
    assert cells[4].get_ylabel().startswith("envs 4")
    assert [axis.get_xlabel() for axis in figure.axes[4:]] == ["environment steps"] * 2
    assert any(label.get_visible() and label.get_text() for label in cells[4].get_xticklabels())


def test_environments_do_not_share_an_axis_of_returns(tmp_path: Path) -> None:
    runs = [*two_algorithms(tmp_path), *make_experiment(tmp_path, "p", [[-5, -4]], env="Pendulum-v1")]
    figure, _ = draw(runs, Look(by="algo"))
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["CartPole-v1", "Pendulum-v1"]
    with pytest.raises(FeverError, match="CartPole-v1, Pendulum-v1, whose scores have different units"):
        draw(runs, Look(by="algo", rows="workers", columns="seed"))


def test_on_a_scale_environments_share_one_curve(tmp_path: Path) -> None:
    """The interquartile mean of all runs: of four scores the middle two."""
    poles = make_experiment(tmp_path, "c", [[0, 100], [0, 500]])
    pendulums = make_experiment(tmp_path, "p", [[-1000, -1000], [-1000, -600]], env="Pendulum-v1")
    scale = {"CartPole-v1": (0.0, 500.0), "Pendulum-v1": (-1000.0, 0.0)}
    figure, _ = draw([*poles, *pendulums], Look(by="algo", scale=scale))
    (axis,) = figure.axes
    assert axis.lines[-1].get_ydata()[[0, -1]].tolist() == pytest.approx([0, (0.2 + 0.4) / 2])
    assert axis.get_ylabel() == "scaled return per episode"
    assert axis.get_legend().get_title().get_text() == "interquartile mean and 95 % interval"
    with pytest.raises(FeverError, match="returns count as 0 and 1 in Pendulum-v1 as well: --scale Pendulum-v1=0,500"):
        draw([*poles, *pendulums], Look(scale={"CartPole-v1": (0, 500)}))


def test_runs_that_stopped_at_their_goal_count_to_the_end(tmp_path: Path) -> None:
    quick = make_run(tmp_path, "a", [0, 100], seed=0, reason="reward")
    slow = make_run(tmp_path, "b", [0] * 10, seed=1)
    figure, _ = draw([quick, slow], Look(by="algo"))
    x, y = figure.axes[0].lines[-1].get_data()
    assert (x[-1], y[-1]) == (1000, 50)


def test_time_has_a_unit(tmp_path: Path) -> None:
    for seconds, label, last in ((100, "s", 50), (4000, "min", 2000 / 60), (40_000, "h", 20_000 / 3600)):
        run = make_run(tmp_path, str(seconds), range(seconds))
        figure, _ = draw([run], Look(x="time", by="run"))
        assert figure.axes[0].get_xlabel() == f"training time in {label}"
        assert figure.axes[0].lines[0].get_xdata()[-1] == pytest.approx(last)


def test_numbers_are_in_order_of_their_size() -> None:
    assert sorted(["10", "9", "ppo", "1e-3", "nan", "default"], key=in_order) == [
        "1e-3",
        "9",
        "10",
        "default",
        "nan",
        "ppo",
    ]


@pytest.mark.parametrize(
    ("look", "sentence"),
    [
        (Look(metric="nothing"), "no run has the metric nothing over steps; the metrics are: .*return_mean"),
        (Look(x="miles"), "--x miles: must be steps, time, episodes"),
        (Look(by="colour"), "--by colour: no run has such a setting; there are: experiment, run, nodes, cpus, env, "),
        (Look(rows="settings"), "--rows settings: no run has such a setting"),
        (Look(by="stop.nothing"), "--by stop.nothing: no run has such a setting"),
        (Look(by="env.size"), "--by env.size: no run has such a setting"),
        (Look(scale={"CartPole-v1": (0, 500)}, metric="episodes"), "--scale is for returns; leave it out, or --metric"),
        (Look(scale={"Hopper-v5": (0, 500)}), "--scale Hopper-v5: it is not among the environments: CartPole-v1"),
        (Look(by="seed", metric="eval/return_mean"), "no run has the metric eval/return_mean"),
    ],
)
def test_what_is_not_there_is_one_sentence(tmp_path: Path, look: Look, sentence: str) -> None:
    with pytest.raises(FeverError, match=sentence):
        draw(two_algorithms(tmp_path), look)


def test_more_groups_than_can_be_told_apart_are_refused(tmp_path: Path) -> None:
    runs = make_experiment(tmp_path, "a", [[1, 2]] * 29)
    with pytest.raises(FeverError, match="seed has 29 values, more than the 28 that can be told apart"):
        draw(runs, Look(by="seed"))


def test_damaged_runs_are_left_out_with_a_note(tmp_path: Path) -> None:
    runs = two_algorithms(tmp_path)
    (runs[0].path / layout.SUMMARY).write_text("[")
    (runs[1].path / layout.METRICS).write_text("")
    figure, notes = draw(runs, Look(by="algo"))
    assert legend(figure) == ["a2c (2 runs)", "ppo (1 run)"]
    assert "summary.json is missing or damaged" in notes[0]
    assert notes[1] == f"left out: {runs[1].path} has no finished episode yet"


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_runs_make_the_same_file(tmp_path: Path, ending: str) -> None:
    runs = two_algorithms(tmp_path)
    files = [tmp_path / f"{number}.{ending}" for number in (1, 2)]
    for file in files:
        save(draw(runs, Look(by="algo"))[0], file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert b"20" + time.strftime("%y-%m").encode() not in files[0].read_bytes()


def test_text_in_an_svg_is_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>&$a^$"
    runs = two_algorithms(tmp_path, env_kwargs={"level": name})
    save(draw(runs, Look(by="env_kwargs.level"))[0], tmp_path / "a.svg")
    texts = ["".join(element.itertext()) for element in ElementTree.parse(tmp_path / "a.svg").iter()]
    assert f"env_kwargs.level {name} (5 runs)" in texts
    assert "return per episode" in texts
    assert "<script>" not in (tmp_path / "a.svg").read_text()


def test_what_a_run_names_is_drawn_as_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runs = [
        make_run(
            tmp_path, f"{seed}", [1, 2, 3], seed=seed, env=EVIL.replace("\ud800", ""), settings={"x$^": EVIL[:500]}
        )
        for seed in range(2)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for number, look in enumerate((Look(by="x$^"), Look(rows="x$^", columns="env", by="run"))):
            for ending in ("png", "svg"):
                save(draw(runs, look)[0], tmp_path / f"{number}.{ending}")
    ElementTree.parse(tmp_path / "1.svg")
    assert capfd.readouterr() == ("", "")


def test_long_runs_are_drawn_quickly(tmp_path: Path) -> None:
    """A million rows take hardly longer than the few thousand that are read of them."""
    run = make_run(tmp_path, "a", [])
    with (run.path / layout.METRICS).open("w") as file:
        for start in range(0, 1_000_000, 10_000):
            file.writelines(
                f'{{"iteration": {k}, "steps": {k * 100}, "return_mean": {k / 1e6}, "entropy": 0.5}}\n'
                for k in range(start + 1, start + 10_001)
            )
    began = time.process_time()
    figure, _ = draw([run], Look(by="run"))
    assert time.process_time() - began < 10  # reading all of it takes longer than drawing
    x, y = figure.axes[0].lines[0].get_data()
    assert (x[-1], y[-1]) == (1e8, 1)
    assert np.allclose(y, x / 1e8, atol=1e-3)


def test_the_command(tmp_path: Path) -> None:
    two_algorithms(tmp_path / "runs")
    done = call_fever("plot", "runs/*", "--by", "algo", "--out", "curves.svg", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "curves.svg\n", "")
    assert "ppo (3 runs)" in (tmp_path / "curves.svg").read_text()
    done = call_fever("plot", "ppo-seed-1", "--by", "seed", "--metric", "episodes", "--to", "b.png", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "b.png\n"), done.stderr
    assert matplotlib.image.imread(tmp_path / "b.png").shape[:2] == (720, 1120)
    done = call_fever("plot", "ppo-seed-1", "--by", "experiment", cwd=tmp_path)
    assert done.stdout == "runs/ppo-seed-0/compared.png\n", done.stderr
    done = call_fever("plot", "ppo-seed-1", "--by", "algo", "--out", "a.txt", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fever: a.txt: a picture is written as .png, .svg or .pdf\n"


def test_runs_without_a_common_time_are_a_point_with_a_note(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, "a", [1, 2]), make_run(tmp_path, "b", [float("nan")] * 9 + [3, 4], seed=1)]
    figure, notes = draw(runs, Look(by="algo", x="time"))
    assert notes == ["ppo: one of its runs ends before all have begun over time: a point is drawn"]
    assert figure.axes[0].lines[-1].get_marker() == "o"


def test_numbers_that_cannot_be_drawn_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", [1, 1e300, -1e300, float("inf"), 2])
    figure, _ = draw([run, make_run(tmp_path, "b", [1e59, -1e59, 3], seed=1)], Look(by="run"))
    assert figure.axes[0].lines[0].get_ydata()[-1] == 2
    save(figure, tmp_path / "a.png")

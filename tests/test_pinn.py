"""experiments/pinn: exact solution, residual, conditions, picture, what LBFGS remembers."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from tiny import curve, same_bits

FOLDER = Path(__file__).parents[1] / "experiments/pinn"
WORDS = ["adam.iterations=3", "adam.num_collocation=20", "lbfgs.steps=3"]
WORDS += ["lbfgs.num_collocation=40", "lbfgs.redraw_interval=3", "inverse.num_measurements=30"]


@pytest.fixture
def burgers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(**runpy.run_path(str(FOLDER / "burgers.py")))
    monkeypatch.setitem(sys.modules, "burgers", module)  # type: ignore[arg-type]
    return module


def test_the_exact_solution_has_the_slope_that_is_published(burgers: SimpleNamespace) -> None:
    x, t = np.array([-1e-6, 1e-6]), np.full(2, 1.6037 / np.pi)
    slope = np.diff(burgers.solution(x, t)) / np.diff(x)
    assert slope.item() == pytest.approx(-152.00516, abs=1e-3)  # Basdevant et al., table 1
    x = np.linspace(-1, 1, 9)
    np.testing.assert_allclose(burgers.solution(x, 0 * x), -np.sin(np.pi * x), atol=1e-12)


def test_the_residual_is_that_of_the_equation(burgers: SimpleNamespace) -> None:
    x, t = burgers.columns(np.linspace(-1, 1, 7), np.linspace(0, 1, 7))
    equation = burgers.Equation(learned=True)
    f = equation.residual(lambda x, t: t * x**3, x, t)
    expected = x**3 + equation.lambda_1 * t * x**3 * 3 * t * x**2 - np.exp(-6) * 6 * t * x
    np.testing.assert_allclose(f.numpy(), expected.numpy(), atol=1e-12)
    equation.lambda_1.set_value(paddle.ones([1], "float64"))
    assert not np.allclose(equation.residual(lambda x, t: t * x**3, x, t), expected)


@pytest.mark.usefixtures("burgers")
def test_the_network_has_the_initial_and_the_boundary_values_before_it_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    net = runpy.run_path(str(FOLDER / "train.py"))["Net"](2, 5, conditions=True)
    net.to(dtype="float64")
    at = paddle.linspace(-1, 1, 9, "float64").unsqueeze(-1)
    np.testing.assert_allclose(net(at, 0 * at), -np.sin(np.pi * at.numpy()), atol=1e-15)
    for end in (-1.0, 1.0):
        np.testing.assert_allclose(net(0 * at + end, at.abs()), 0 * at, atol=1e-15)


@pytest.mark.parametrize("history", [[], [[0.5, 0.002], [0.9, 0.004]]])
def test_the_picture_has_its_axes_and_the_coefficients_as_shares(
    history: list[list[float]], burgers: SimpleNamespace
) -> None:
    draw = runpy.run_path(str(FOLDER / "pictures.py"))["draw_solution"]
    exact = burgers.solution(*burgers.grid())
    figure = draw(burgers.grid(), exact + 0.1, exact, [np.zeros(3)] * 2, history, "title")
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert len(panels) == 6 + bool(history)
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)
    error = next(axes for axes in panels if axes.get_title() == "|u - exact|")
    np.testing.assert_allclose(error.collections[0].get_array(), 0.1)
    if history:
        np.testing.assert_allclose(panels[-1].lines[0].get_ydata(), [0.5, 0.9])
        np.testing.assert_allclose(panels[-1].lines[1].get_ydata(), [0.2 * np.pi, 0.4 * np.pi])


def run_pinn(output: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    given = ["--output", str(output), "problem=inverse", *WORDS, "training.save_interval=1"]
    given += ["training.log_interval=1", "training.valid_interval=0", *words]
    monkeypatch.setattr(sys, "argv", [str(FOLDER / "train.py"), *given])
    runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")


@pytest.mark.long
def test_pinn_goes_on_with_what_lbfgs_remembers_its_points_and_its_coefficients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for end in (2, 5, 7, 8):  # with Adam, and before and after points are drawn anew
        run_pinn(tmp_path / "run", f"training.max_iteration={end}", monkeypatch=monkeypatch)
    run_pinn(tmp_path / "straight", "training.max_iteration=8", monkeypatch=monkeypatch)
    for name in ("train/loss", "train/mse_f", "train/mse_u", "train/lambda_1", "train/lambda_2"):
        continued, straight = (curve(tmp_path / run, name) for run in ("run", "straight"))
        assert continued == straight
        assert len({*straight.values()}) == 8  # each update has moved it
    same_bits(*(tmp_path / run / "checkpoints/step-00000008" for run in ("run", "straight")))


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["problem=invers"], "problem='invers' on 1"),
        (["--nprocs", "2"], "'inverse' on 2 processes"),
    ],
)
def test_pinn_names_a_problem_that_it_does_not_know_and_several_processes(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_of:
        run_pinn(tmp_path / "run", *words, monkeypatch=monkeypatch)
    assert named in f"{exit_of.value}{capfd.readouterr().err}"

"""The picture of a solution: u, its error, the collocation points, and the coefficients."""

import numpy as np
from burgers import TRUE
from matplotlib.figure import Figure

TIMES = (0.25, 0.5, 0.75)


def draw_solution(grid, u, exact, points, history, title):
    """Returns a figure; u and exact are [T, X] on a grid, points are x and t, [N] each.

    `history` has λ1 and λ2 after each update, or nothing.
    """
    x, t = grid[0][0], grid[1][:, 0]
    rows = [["field", "error", "points"], [*"012"]]
    figure = Figure(figsize=(13, 9 if history else 6), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplot_mosaic(rows + [["history"] * 3] * bool(history))
    fields = {
        "field": (u, "u(x, t)", {"cmap": "RdBu_r", "vmin": -1, "vmax": 1}),
        "error": (np.abs(u - exact), "|u - exact|", {"cmap": "magma"}),
    }
    for name, (values, text, colours) in fields.items():
        mesh = panels[name].pcolormesh(t, x, values.T, **colours)
        panels[name].set(title=text, xlabel="t", ylabel="x")
        figure.colorbar(mesh, ax=panels[name])
    panels["points"].scatter(points[1], points[0], s=2, color="tab:blue")
    text = f"{len(points[0])} collocation points"
    panels["points"].set(title=text, xlabel="t", ylabel="x", xlim=(0, 1), ylim=(-1, 1))
    for name, time in zip("012", TIMES, strict=True):
        row = np.abs(t - time).argmin()
        panels[name].plot(x, exact[row], color="tab:blue", linewidth=3, label="exact")
        panels[name].plot(x, u[row], "--", color="tab:red", label="network")
        panels[name].set(title=f"t = {time}", xlabel="x", ylabel="u", ylim=(-1.1, 1.1))
    panels["0"].legend()
    if history:
        draw_history(panels["history"], np.array(history))
    return figure


def draw_history(panel, history):
    """Draws λ1 and λ2 [N, 2] after each update, as shares of the true ones."""
    shares = history / list(TRUE.values())
    panel.plot(range(1, len(shares) + 1), shares, label=["λ1 / true", "λ2 / true"])
    panel.axhline(1, color="black", linestyle=":", label="true")
    panel.set(title="the learned coefficients", xlabel="iteration", ylabel="share of the true one")
    panel.set(ylim=(-0.5, 2))  # a line search may leave it for a while
    panel.legend()

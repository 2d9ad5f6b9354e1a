"""The picture of a solution: the field, its error, and the shock at three times."""

import numpy as np
from matplotlib.figure import Figure

TIMES = (0.25, 0.5, 0.75)


def draw_solution(grid, u, exact, points, title):
    """Returns a figure; u and exact are [T, X] on a grid, points are x and t, [N] each."""
    x, t = grid[0][0], grid[1][:, 0]
    figure = Figure(figsize=(12, 6), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplot_mosaic(["field field field error error error".split(), [*"001122"]])
    fields = {
        "field": (u, "u(x, t)", {"cmap": "RdBu_r", "vmin": -1, "vmax": 1}),
        "error": (np.abs(u - exact), "error, and the points of the equation", {"cmap": "magma"}),
    }
    for name, (values, text, colours) in fields.items():
        mesh = panels[name].pcolormesh(t, x, values.T, **colours)
        panels[name].set(title=text, xlabel="t", ylabel="x")
        figure.colorbar(mesh, ax=panels[name])
    panels["error"].plot(points[1], points[0], "w,", alpha=0.5)
    for name, time in zip("012", TIMES, strict=True):
        row = np.abs(t - time).argmin()
        panels[name].plot(x, exact[row], color="tab:blue", linewidth=3, label="exact")
        panels[name].plot(x, u[row], "--", color="tab:red", label="network")
        panels[name].set(title=f"t = {time}", xlabel="x", ylabel="u", ylim=(-1.1, 1.1))
    panels["0"].legend()
    return figure

"""What a classifier got most wrong, and what it takes for what, as one figure."""

import numpy as np
from matplotlib.figure import Figure

ROWS, COLUMNS = 4, 6


def draw_mistakes(data, losses, predicted, names):
    """The images of largest loss, each with what it was taken for, and all of them in a matrix.

    `data` has pairs of an image [3, H, W] and a label; `losses` and `predicted` are [N], in its
    order; `names` are those of the classes.
    """
    figure = Figure(figsize=(14, 6.5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[COLUMNS, ROWS + 1])
    worst = np.argsort(-losses, kind="stable")[: ROWS * COLUMNS]
    for axes in left.subplots(ROWS, COLUMNS).flat:
        axes.axis("off")
    for axes, number in zip(left.axes, worst, strict=False):
        image, label = data[number]
        axes.imshow(image.transpose(1, 2, 0))
        said, true = names[predicted[number]], names[label]
        colour = "black" if said == true else "firebrick"
        axes.set_title(f"{said}\n({true}) {losses[number]:.1f}", fontsize=9, color=colour)
    left.suptitle("largest losses: predicted (true) loss")
    labels = [label for _, label in data]
    draw_confusion(right.subplots(), predicted, labels, names)
    return figure


def draw_confusion(axes, predicted, labels, names):
    counts = np.zeros([len(names), len(names)], int)
    np.add.at(counts, (labels, predicted), 1)
    axes.imshow(counts, cmap="Blues")
    for (row, column), count in np.ndenumerate(counts):
        colour = "white" if count > counts.max() / 2 else "black"
        if count:
            axes.text(column, row, count, ha="center", va="center", color=colour, fontsize=8)
    axes.set(title="all images", xlabel="predicted", ylabel="true")
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set_yticks(range(len(names)), names)

"""Draws an archive in the format of CIFAR-10's: ten shapes, 3,000 images, in under ten seconds.

    python shapes.py shapes.tar.gz

The shapes have any place, size, direction and colour, on a background that runs from one colour to
another, under noise. As in CIFAR-10 one image in six is for the test.
"""

import argparse
import gzip
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np

SIDE, FINE = 32, 4  # pixels; points of each pixel along a side, whose mean it shows
NOISE = 20  # standard deviation, of 255
CONTRAST = 70  # at least, of the shape to each side, of 255
TILT = np.pi / 6  # at most
NUM_TRAINING_FILES = 5


def polygon(x, y, num_corners):
    """Where a point lies from the centre (0) to the side (1) of a regular polygon."""
    part = 2 * np.pi / num_corners
    angle = np.arctan2(x, y) % part - part / 2
    return np.hypot(x, y) * np.cos(angle) / np.cos(part / 2)


def star(x, y):
    angle = np.abs((np.arctan2(x, y) + np.pi / 5) % (2 * np.pi / 5) - np.pi / 5)
    return np.hypot(x, y) * np.sin(angle + 0.31) < 0.31


def heart(x, y):
    return (x**2 + y**2 - 0.9) ** 3 < x**2 * y**3


def arrow(x, y):
    shaft = (abs(x) < 0.2) & (abs(y + 0.35) < 0.55)
    return shaft | ((y > 0) & (abs(x) < 0.75 * (0.95 - y)))


# Of points [H, W] from -1 to 1: whether they belong to the shape.
SHAPES = {
    "disc": lambda x, y: np.hypot(x, y) < 0.85,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.7) < 0.2,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.75,
    "triangle": lambda x, y: polygon(x, y, 3) < 1,
    "hexagon": lambda x, y: polygon(x, y, 6) < 1,
    "star": star,
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.25) & (np.maximum(abs(x), abs(y)) < 0.9),
    "heart": lambda x, y: heart(1.2 * x, 1.2 * y + 0.2),
    "crescent": lambda x, y: (np.hypot(x, y) < 0.9) & (np.hypot(x - 0.45, y) > 0.75),
    "arrow": arrow,
}


def draw_image(draw, inside):
    """One image, [3, 32, 32], uint8."""
    side = (np.arange(SIDE * FINE) + 0.5) / (SIDE * FINE) * 2 - 1
    x, y = np.meshgrid(side, -side)
    angle, size = draw.uniform(-TILT, TILT), draw.uniform(0.6, 0.9)
    dx, dy = draw.uniform(size - 1, 1 - size, size=2)
    u = (np.cos(angle) * (x - dx) + np.sin(angle) * (y - dy)) / size
    v = (np.cos(angle) * (y - dy) - np.sin(angle) * (x - dx)) / size
    shape = inside(u, v).reshape(SIDE, FINE, SIDE, FINE).mean(axis=(1, 3))
    colours = draw.uniform(0, 255, [3, 3, 1, 1])  # of the shape, and of two sides
    while abs(colours[0] - colours[1:]).mean(axis=(1, 2, 3)).min() < CONTRAST:
        colours = draw.uniform(0, 255, [3, 3, 1, 1])
    slope = draw.uniform(-1, 1, 2) @ [x[::FINE, ::FINE].ravel(), y[::FINE, ::FINE].ravel()]
    slope = (slope.reshape(SIDE, SIDE) + 2) / 4
    ground = colours[1] + slope * (colours[2] - colours[1])
    image = ground + shape * (colours[0] - ground) + draw.normal(0, NOISE, [3, SIDE, SIDE])
    return image.clip(0, 255).astype("uint8")


def draw_batch(draw, num_images):
    labels = draw.randint(len(SHAPES), size=num_images)
    insides = [*SHAPES.values()]
    images = [draw_image(draw, insides[label]) for label in labels]
    return {b"data": np.reshape(images, [num_images, -1]), b"labels": labels.tolist()}


def write_archive(path, num_images):
    draw = np.random.RandomState(0)  # whose numbers no version of numpy will change
    names = [f"data_batch_{number + 1}" for number in range(NUM_TRAINING_FILES)] + ["test_batch"]
    files = {name: draw_batch(draw, num_images // len(names)) for name in names}
    files["batches.meta"] = {b"label_names": [name.encode() for name in SHAPES]}
    temporary = path.with_name(f"{path.name}.tmp")
    with (
        gzip.GzipFile(temporary, "wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, content in files.items():
            text = pickle.dumps(content, protocol=2)
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    temporary.replace(path)  # it is there whole, or not at all


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the archive, a .tar.gz")
    parser.add_argument("--num_images", type=int, default=3000)
    args = parser.parse_args()
    write_archive(args.path, args.num_images)
    print(f"{args.path}: {args.num_images} images of {', '.join(SHAPES)}")

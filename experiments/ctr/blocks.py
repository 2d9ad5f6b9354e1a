"""Text files as a map-style data set of blocks of lines, so that a resume skips without reading.

Works for hundreds of millions of lines: beside the files there is only a small array with the place
of each block. Knows nothing of what a line means but that it holds whole numbers.
"""

import os

import numpy as np
from paddle.io import Dataset


def write_whole(path, write):
    """Has `write(file)` fill a file that appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def index_of(path, block_size):
    """Where each block of so many lines begins and the last one ends, in bytes: [blocks + 1].

    Scans the file once; the index then lies beside it, and is made anew if the file grows.
    """
    index_path = path.with_name(f"{path.name}.{block_size}.npy")
    if index_path.exists() and (index := np.load(index_path))[-1] == path.stat().st_size:
        return index
    parts, num_bytes, num_lines = [[0]], 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            ends = np.flatnonzero(np.frombuffer(chunk, "uint8") == ord("\n")) + 1 + num_bytes
            parts.append(ends[-(num_lines + 1) % block_size :: block_size])
            num_bytes += len(chunk)
            num_lines += len(ends)
    index = np.unique(np.concatenate([*parts, [num_bytes]]))
    write_whole(index_path, lambda file: np.save(file, index))
    return index


class Blocks(Dataset):
    """One seek, one read and one parse for each block; gives the numbers, [lines, columns]."""

    def __init__(self, paths, block_size, num_columns):
        self.paths = paths
        self.num_columns = num_columns
        indexes = [index_of(path, block_size) for path in paths]
        files = np.repeat(np.arange(len(paths)), [len(index) - 1 for index in indexes])
        starts = np.concatenate([index[:-1] for index in indexes])
        # [blocks, 3]: file, first byte, bytes. An array: a list would be copied into each worker.
        self.places = np.column_stack([files, starts, np.concatenate([*map(np.diff, indexes)])])

    def __len__(self):
        return len(self.places)

    def __getitem__(self, block):
        number, start, num_bytes = self.places[block]
        with open(self.paths[number], "rb") as file:  # opened here: workers share no position
            file.seek(start)
            text = file.read(num_bytes)
        return np.fromstring(text, int, sep=" ").reshape(-1, self.num_columns)

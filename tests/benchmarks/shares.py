"""What training.shares costs an update of experiments/charlm, beside the usual way.

    python tests/benchmarks/shares.py [--slices 12]

In one run, slice by slice in turn, each experiment in a process or in processes of its own that are
stopped meanwhile: on one process four shares against accumulation_steps: 4; on two processes two
shares, one on each, against DataParallel. Printed are medians of seconds per update, their ratio,
and the most memory that a process had.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

from expbase.ranks import collectives  # noqa: E402
from expbase.ranks.launch import StopSignals, spawn  # noqa: E402

CHARLM = Path(__file__).parents[2] / "experiments" / "charlm" / "train.py"
UPDATES = 10  # of a slice


def slices(output: Path, **training: Any) -> Iterator[float]:
    """Trains a slice at a time; the seconds of each update of it."""
    spec = importlib.util.spec_from_file_location("charlm", CHARLM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.CharLM.default_config()
    config.data.num_files = 20
    config.early_stopping.patience = 0
    quiet = {"valid_interval": 0, "save_interval": 0, "log_interval": 0, "max_iteration": 10**6}
    config.training.update({**quiet, **training})
    exp = module.CharLM(config, argparse.Namespace(output=str(output), device="cpu"))
    with contextlib.redirect_stderr(io.StringIO()):
        exp.setup()
    with contextlib.closing(exp):
        while True:
            began = time.perf_counter()
            for _ in range(UPDATES):
                assert exp.going_on()
                exp.train_batch()
                exp.end_iteration()
            yield (time.perf_counter() - began) / UPDATES


def measure(folder: Path, count: int, ways: Sequence[dict[str, int]]) -> None:
    """In turn in this process, or in these processes; rank 0 prints."""
    runs = [slices(folder / f"{collectives.world_size()}-{n}", **way) for n, way in enumerate(ways)]
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(count + 1):
        for place, run in enumerate(runs):
            one = next(run)
            if number:  # the first one warms up
                seconds[place].append(one)
    if collectives.rank() == 0:
        usual, shared = map(statistics.median, seconds)
        print(
            f"{collectives.world_size()} processes: {usual * 1e3:.1f} ms, with shares "
            f"{shared * 1e3:.1f} ms, ratio {shared / usual:.3f}",
            flush=True,
        )


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slices", type=int, default=12)
    count = parser.parse_args().slices
    with tempfile.TemporaryDirectory() as folder:
        ways = [{"accumulation_steps": 4}, {"shares": 4}]
        spawn(measure, (Path(folder), count, ways), 1, "cpu", StopSignals())
        ways = [{"accumulation_steps": 1}, {"shares": 2}]
        spawn(measure, (Path(folder), count, ways), 2, "cpu", StopSignals())


if __name__ == "__main__":
    main()

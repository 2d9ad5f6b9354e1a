"""What device.py starts on a device: a small experiment, and measurements of one process.

The experiment has what may differ from one time to the next there: a convolution, matrices, an
embedding, batch norm, dropout and draws on the device; `model.amp` trains it in 16 bits. The
variable ON_DEVICE says what happens to a start: "kill 9" ends the last rank in iteration 9 as by
`kill -9`, "exhaust 9" asks there for more memory than there is. A measurement prints a line with
its result.

    python tests/proofs/on_device.py --device gpu --output runs/on_device model.amp=float16-O2
    python tests/proofs/on_device.py speed gpu --output runs/speed --steps 200
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import resource
import shutil
import signal
import statistics
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import paddle  # noqa: E402
import paddle.nn.functional as F  # noqa: E402
import pretend  # noqa: E402
import psutil  # noqa: E402
from paddle.base import core  # noqa: E402
from paddle.io import DataLoader, Dataset  # noqa: E402

from expbase import Config, ExperimentBase, main  # noqa: E402
from expbase.base.device import (  # noqa: E402
    kind_of,
    number_of_devices,
    peak_memory,
    repeatable_flags,
)
from expbase.checkpoint import storage  # noqa: E402
from expbase.ranks.set_device import set_device  # noqa: E402
from expbase.record.provenance import device  # noqa: E402

TO_DO = "ON_DEVICE"
KILLED = "killed"  # a file in the output directory
RESULT = "RESULT: "  # begins the line of a measurement
BATCH_SIZE, TOKENS = 8, 32
FIRST = 11  # iteration at which a measurement begins; a DataLoader has read ahead by then
WORKERS = (0, 2)
ENORMOUS = 1 << 40  # numbers of four bytes, which no device has


class Pictures(Dataset):
    """Small pictures with noise that is drawn anew, each with a token and a label."""

    def __init__(self, size: int) -> None:
        generator = np.random.RandomState(7)
        self.pictures = generator.randn(size, 1, 8, 8).astype("float32")
        self.labels = (self.pictures.sum(axis=(1, 2, 3)) > 0).astype("int64")

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64, np.int64]:
        noise = np.random.randn(1, 8, 8).astype("float32") / 10
        return self.pictures[index] + noise, np.int64(index % TOKENS), self.labels[index]

    def __len__(self) -> int:
        return len(self.labels)


class Layers(paddle.nn.Layer):
    """Layers of the kinds whose kernels may add up in an order of their own.

    Args:
        wide: Features of four more layers, with which a device has more to do than its host.
    """

    def __init__(self, wide: int = 0) -> None:
        super().__init__()
        self.tokens = paddle.nn.Embedding(TOKENS, 64)
        widths = [512, wide, wide, wide, wide] if wide else [512]
        self.layers = paddle.nn.Sequential(
            paddle.nn.Conv2D(1, 8, 3, padding=1), paddle.nn.BatchNorm2D(8), paddle.nn.ReLU(),
            paddle.nn.Flatten(), paddle.nn.Dropout(0.2),
            *(paddle.nn.Linear(*pair) for pair in itertools.pairwise([*widths, 2])),
        )  # fmt: skip

    def forward(self, pictures: Any, tokens: Any) -> Any:
        return self.layers(pictures + self.tokens(tokens).reshape([-1, 1, 8, 8]))


class Matrices(paddle.nn.Layer):
    """Two matrices, which the pretend device multiplies in 16 bits, too."""

    def __init__(self, wide: int = 0) -> None:
        super().__init__()
        self.layers = paddle.nn.Sequential(
            paddle.nn.Flatten(), paddle.nn.Linear(64, 32), paddle.nn.Linear(32, 2)
        )

    def forward(self, pictures: Any, tokens: Any) -> Any:
        return self.layers(pictures)


NETS: dict[str, Any] = {"layers": Layers, "matrices": Matrices}


def net_for(device: str) -> str:
    """The net whose kernels a device has: the pretend one has few, and copies for all others."""
    return "matrices" if device.startswith(pretend.NAME) else "layers"


class OnDevice(ExperimentBase):
    """The experiment; `data.megabytes` of parameters that are not trained make it larger."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.data = Config({"samples": 160, "workers": 0})
        config.model = Config({"net": "layers", "amp": "", "megabytes": 0, "wide": 0})
        config.training.update(max_iteration=24, save_interval=6, valid_interval=12)
        config.training.update(log_interval=1, deterministic=True)
        return config

    def setup_dataloader(self) -> None:
        self.train_loader = loader(self.config.data.workers, self.config.data.samples)
        self.valid_loader = loader(0, 20)

    def setup_model(self) -> None:
        self.dtype, _, self.level = self.config.model.amp.partition("-")
        net = NETS[self.config.model.net](self.config.model.wide)
        self.optimizer = optimizer(net, multi_precision=self.level == "O2")
        if self.config.model.megabytes:
            self.ballast = Ballast(self.config.model.megabytes)
        if self.level == "O2":
            net, self.optimizer = paddle.amp.decorate(
                net, self.optimizer, level="O2", dtype=self.dtype, master_weight=True
            )
        if self.dtype == "float16":  # so great a scale that gradients overflow, again and again
            self.scaler = paddle.amp.GradScaler(
                init_loss_scaling=2.0**24, incr_every_n_steps=3, decr_every_n_nan_or_inf=1
            )
        self.model = self.data_parallel(net)

    def train_batch(self) -> None:
        what, _, iteration = os.environ.get(TO_DO, "").partition(" ")
        if iteration == str(self.iteration) and self.rank == self.world_size - 1:
            if what == "kill":
                (self.output_dir / KILLED).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            self.enormous = paddle.empty([ENORMOUS])
        pictures, tokens, labels = self.read_batch()
        loss = self.loss(moved(pictures), tokens, labels)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)
        if self.dtype == "float16":
            self.log(scale=self.scaler.state_dict()["scale"].item())

    def loss(self, pictures: Any, tokens: Any, labels: Any) -> Any:
        """Of a batch."""
        if not self.dtype:
            return F.cross_entropy(self.model(pictures, tokens), labels)
        with paddle.amp.auto_cast(level=self.level, dtype=self.dtype):
            return F.cross_entropy(self.model(pictures, tokens), labels)

    def valid(self) -> None:
        for batch in self.valid_batches():
            self.log(loss=self.loss(*batch))

    def on_train_begin(self) -> None:
        """Notes what this start has of the weights."""
        self.note(weights=weights(self.model))

    def on_train_end(self) -> None:
        """Notes the weights at its end; and who draws, when all that is compared is done."""
        self.note(weights=weights(self.model), drawn_by=drawn_by())

    def note(self, **facts: Any) -> None:
        """A line about this start."""
        facts |= {"iteration": self.iteration, "device": paddle.device.get_device()}
        with (self.output_dir / f"notes_{self.rank}").open("a") as file:
            file.write(json.dumps(facts) + "\n")


class Ballast(paddle.nn.Layer):
    """Parameters of so many megabytes, each as large as a large layer's."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        ones = paddle.nn.initializer.Constant(1.0)
        for begun in range(0, megabytes, 64):
            shape = [min(64, megabytes - begun), 1 << 18]
            parameter = self.create_parameter(shape, default_initializer=ones)
            self.add_parameter(f"part_{begun}", parameter)


def loader(workers: int, samples: int) -> DataLoader:
    """The data of the experiment and of the loop by hand."""
    data = Pictures(samples)
    return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, num_workers=workers)


def optimizer(net: Any, **options: Any) -> Any:
    return paddle.optimizer.AdamW(0.01, parameters=net.parameters(), **options)


def moved(pictures: Any) -> Any:
    """With noise that is drawn on the device."""
    return pictures + paddle.uniform(pictures.shape, min=-0.01, max=0.01)


def weights(model: Any) -> dict[str, int]:
    """A checksum of each tensor, in 32 bits whatever its own are."""
    return {
        name: zlib.crc32(tensor.cast("float32").numpy().tobytes())
        for name, tensor in model.state_dict().items()
    }


def synchronize() -> None:
    """Waits for the device; for the CPU paddle's own function is an error."""
    if paddle.device.get_device() != "cpu":
        paddle.device.synchronize()


def drawn_by() -> str:
    """The devices whose generators a draw on this one moves, in words."""

    def states() -> list[Any]:
        of_cpu = [core.default_cpu_generator().get_state()]
        return [[state.__getstate__() for state in of] for of in (paddle.get_rng_state(), of_cpu)]

    before = states()
    paddle.rand([8])
    names = [paddle.device.get_device().partition(":")[0], "cpu"]
    pairs = zip(names, before, states(), strict=True)
    return " and ".join(dict.fromkeys(name for name, then, now in pairs if then != now))


# --- measurements --------------------------------------------------------------------------


class Window:
    """Something that is measured from right before an update to right after a later one."""

    def __init__(self, last: int, begin: Callable[[], Any], end: Callable[[Any], float]) -> None:
        self.last = last
        self._begin, self._end = begin, end
        self.figure = 0.0

    def before(self, iteration: int) -> None:
        if iteration == FIRST:
            self._then = self._begin()

    def after(self, iteration: int) -> None:
        if iteration == self.last:
            self.figure = self._end(self._then)


def by_hand(
    window: Window, batches: Iterable[Any], args: argparse.Namespace, wide: int = 0
) -> float:
    """The same training without expbase, which keeps its losses for a line, too."""
    net = NETS[net_for(args.device)](wide)
    step = optimizer(net)
    losses = []
    for iteration, (pictures, tokens, labels) in enumerate(batches, 1):
        window.before(iteration)
        loss = F.cross_entropy(net(moved(pictures), tokens), labels)
        losses.append(loss.detach().clone())
        loss.backward()
        step.step()
        step.clear_grad()
        window.after(iteration)
    return window.figure


def by_expbase(window: Window, workers: int, args: argparse.Namespace, wide: int = 0) -> float:
    """It with expbase, a line each ten iterations as by default."""

    class Measured(OnDevice):
        def on_train_batch_begin(self) -> None:
            window.before(self.iteration)

        def on_train_batch_end(self) -> None:
            window.after(self.iteration)

    training = {"max_iteration": window.last, "save_interval": 0, "valid_interval": 0}
    training |= {"log_interval": 10, "deterministic": False}
    words = [f"training.{key}={value}" for key, value in training.items()]
    words += [f"data.samples={BATCH_SIZE * window.last}", f"data.workers={workers}"]
    words += [f"model.net={net_for(args.device)}", f"model.wide={wide}"]
    main(Measured, argv=["--output", str(args.output), "--device", args.device, "--fresh", *words])
    return window.figure


def speed(args: argparse.Namespace) -> str:
    """The time of an update of both, which take turns; in ms.

    An update of the small net keeps the host busy, that of the wide one the device.
    """

    def window() -> Window:
        def begin() -> float:
            synchronize()
            return time.perf_counter()

        def end(then: float) -> float:
            synchronize()
            return 1e3 * (time.perf_counter() - then) / args.steps

        return Window(FIRST + args.steps - 1, begin, end)

    texts = []
    for wide in sorted({0, args.wide}):
        ratios, times = [], []
        for workers in WORKERS:
            pairs = []
            for _ in range(args.rounds):
                one, other = window(), window()
                hand = by_hand(one, loader(workers, BATCH_SIZE * one.last), args, wide)
                pairs.append((by_expbase(other, workers, args, wide), hand))
            ratios.append(statistics.median(ours / hand for ours, hand in pairs))
            times.append(statistics.median(hand for _, hand in pairs))
        texts.append(
            f"{'wide' if wide else 'small'} net: 0 workers {ratios[0]:.2f}, 2 workers "
            f"{ratios[1]:.2f} times the {times[0]:.2f} and {times[1]:.2f} ms of a bare loop"
        )
    return "; ".join(texts)


def waits(args: argparse.Namespace) -> str:
    """Waits for the device per update between two lines, in whatever thread.

    By hand once more with a batch that is on the device: what the update itself waits for.
    """
    last = FIRST + 8  # the line of iteration 20 is not among them
    begin, end = counter(args)

    def window() -> Window:
        return Window(last, begin, lambda then: end(then) / (last - FIRST + 1))

    batch = next(iter(loader(0, BATCH_SIZE)))
    of_update = by_hand(window(), [batch] * last, args)
    ours = [by_expbase(window(), workers, args) for workers in WORKERS]
    hand = [by_hand(window(), loader(n, BATCH_SIZE * last), args) for n in WORKERS]
    text = "0 workers {:.1f}, 2 workers {:.1f}".format(*ours)
    text += f"; the update itself {of_update:.1f}"
    text += "; with paddle's loader 0 workers {:.1f}, 2 workers {:.1f}".format(*hand)
    # On a busy machine the loader's thread may copy in the window what it should have read ahead
    # before it: paddle keeps two batches for each worker, and the thread holds one.
    updates = last - FIRST + 1
    of_copies = max(hand) * (updates + 2 * WORKERS[1] + 1) / updates
    is_waiting = ours[0] >= of_update + 1 or ours[1] >= of_update + of_copies + 1
    return f"FAILED: {text}" if is_waiting else text


def counter(args: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """How waits are counted on this device: what begins it, and what returns their number."""
    kind = kind_of(args.device)
    if kind == pretend.NAME:
        return pretend.counts, lambda then: pretend.counts().since(then).waits
    if kind != "gpu":
        raise NotHereError("who waits is counted on a GPU and on the pretend device only")
    trace = args.output.with_suffix(".trace.json")

    def begin() -> Any:
        targets = [paddle.profiler.ProfilerTarget.CPU, paddle.profiler.ProfilerTarget.GPU]
        profiler = paddle.profiler.Profiler(targets=targets, on_trace_ready=lambda _: None)
        profiler.start()
        return profiler

    def end(profiler: Any) -> float:
        profiler.stop()
        profiler.export(str(trace), format="json")
        return gpu_waits(trace.read_text(errors="replace"))

    return begin, end


def gpu_waits(trace: str) -> int:
    """How many calls of CUDA wait for the device in a trace of paddle's profiler.

    They are its events of the category CudaRuntime, named as CUPTI names them
    (paddle/fluid/platform/profiler/chrometracing_logger.cc): cudaStreamSynchronize_v3020[0.01 ms].
    """
    names = re.findall(r'"name": "(cuda\w+)\[', trace)
    if not names:
        raise NotHereError("the profiler of this paddle has recorded no call of CUDA")
    return sum(bool(re.match(r"cuda\w+Synchronize|cudaMemcpy(_|$)", name)) for name in names)


def flags(args: argparse.Namespace) -> str:
    """What there is: paddle, the device, the flags for repeatable kernels."""
    paddle.ones([2]).numpy()
    found = ", ".join(name.removeprefix("FLAGS_") for name in repeatable_flags())
    built = f"paddle {paddle.__version__}"
    if paddle.device.is_compiled_with_cuda():
        built += f" for CUDA {paddle.version.cuda()}, cuDNN {paddle.version.cudnn()}"
    text = f"{built}, {device()}, flags: {found or 'none'}"
    is_lacking = args.device.startswith("gpu") and "FLAGS_cudnn_deterministic" not in found
    return f"FAILED: no flag cudnn_deterministic; {text}" if is_lacking else text


def save(args: argparse.Namespace) -> str:
    """How long training stands while a large checkpoint is taken, and what memory that needs.

    Two of them: the second one when the first has been written.
    """
    begun: list[float] = []
    stood: list[float] = []
    written: list[tuple[Path, float]] = []
    before: dict[str, float] = {}

    class Large(OnDevice):
        def train_batch(self) -> None:
            super().train_batch()
            if len(written) == 2:
                self.stop("both are written")
            elif len(begun) == len(written):
                self.save()  # at the end of this iteration
                synchronize()
                before.update(before or peak_memory() | {"memory_gb": resident()})
                begun.append(0.0)

        def on_train_batch_end(self) -> None:
            if len(stood) < len(begun):
                begun[-1] = time.perf_counter()

        def on_train_batch_begin(self) -> None:
            if len(stood) < len(begun):
                stood.append(time.perf_counter() - begun[-1])

        def on_checkpoint_written(self, path: Path) -> None:
            written.append((path, time.perf_counter() - begun[-1]))

    training = {"max_iteration": 10**6, "save_interval": 0, "valid_interval": 0, "log_interval": 0}
    words = [f"training.{key}={value}" for key, value in training.items()]
    words += [f"model.megabytes={fitting(args)}"]
    main(Large, argv=["--output", str(args.output), "--device", args.device, *words])
    peaks = peak_memory()
    for path, _ in written:
        storage.verify(path)
    size = sum(file.stat().st_size for file in path.iterdir())
    more = ", ".join(
        f"{name.removesuffix('memory_gb').rstrip('_') or 'host'} +{peaks[name] - was:.2f} GB"
        for name, was in before.items()
    )
    return (
        f"{size * 1e-9:.2f} GB: training stood {stood[0]:.2f} s, the second time {stood[1]:.2f} s; "
        f"written after {written[0][1]:.1f} s and {written[1][1]:.1f} s; peaks: {more}"
    )


def fitting(args: argparse.Namespace) -> int:
    """So many megabytes, or fewer: a third of what host, disk and GPU have."""
    room = [psutil.virtual_memory().available, shutil.disk_usage(args.output.parent).free]
    if args.device.startswith("gpu"):
        room.append(paddle.device.cuda.get_device_properties(args.device).total_memory)
    return int(min(args.megabytes, min(room) / 3e6))


def resident() -> float:
    """The memory that this process has now, in GB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() * 1e-9


class NotHereError(Exception):
    """A device cannot do what is to be measured."""


def count(args: argparse.Namespace) -> str:
    """How many devices of this kind there are."""
    return str(number_of_devices(kind_of(args.device)))


def halves(args: argparse.Namespace) -> str:
    """The types of 16 bits in which this device trains."""
    is_there = {
        "float16": paddle.amp.is_float16_supported(),
        "bfloat16": paddle.amp.is_bfloat16_supported(),
    }
    return " ".join(name for name, there in is_there.items() if there) or "none"


MEASUREMENTS = {
    "count": count,
    "halves": halves,
    "flags": flags,
    "speed": speed,
    "waits": waits,
    "save": save,
}


def measured() -> None:
    """Prints a result, which device.py reads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=MEASUREMENTS)
    parser.add_argument("device")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--wide", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=4096)
    args = parser.parse_args()
    set_device(args.device, deterministic=False)
    try:
        text = MEASUREMENTS[args.name](args)
    except NotHereError as reason:
        text = f"not here: {reason}"
    print(f"{RESULT}{text}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in MEASUREMENTS:
        measured()
    else:
        main(OnDevice)

"""Two runs on the board, as a browser shows them: pictures of its pages.

The digits with two learning rates; each validation adds what was confused, as a figure, the digits
that were taken for others, as an image, and the weights of the first layer, as a histogram.

    python tests/proofs/board.py PICTURES [--runs DIR]    # needs chromium on the PATH
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import itertools
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_SECONDS = 30.0  # that anything may take
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-sync", "--disable-breakpad", "--no-first-run", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
# The pixels of a canvas by colour, among them the colours of the first two runs.
_COLOURS = """[...document.querySelectorAll("canvas")].map(canvas => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const near = wanted => {
    let count = 0;
    for (let i = 0; i < data.length; i += 4)
      if (data[i + 3] > 99 && wanted.every((c, k) => Math.abs(c - data[i + k]) < 9)) count += 1;
    return count;
  };
  return [near([41, 50, 225]), near([0, 204, 136])];
})"""


@dataclass
class Board:
    """A board that answers.

    Attributes:
        address: Where, with a slash at the end.
        said: What it printed so far.
        process: Its process.
    """

    address: str
    said: list[str]
    process: subprocess.Popen[str]


@contextlib.contextmanager
def board(folder: Path, *words: str) -> Iterator[Board]:
    """Starts one, waits until it answers, and kills it afterwards if it is still there."""
    command = [sys.executable, "-W", "ignore", "-m", "expbase", "board", str(folder), *words]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        said = _said_until(process, "from another machine")
        address = next(line for line in said if line.startswith("http://"))
        yield Board(address.split()[0].removesuffix("app/scalar"), said, process)
    finally:
        process.kill()
        process.communicate()


def _said_until(process: subprocess.Popen[str], beginning: str) -> list[str]:
    said: list[str] = []
    limit = threading.Timer(_SECONDS, process.kill)
    limit.start()
    assert process.stdout
    for line in process.stdout:
        said.append(line.rstrip("\n"))
        if line.startswith(beginning):
            limit.cancel()
            return said
    limit.cancel()
    assert process.stderr
    raise AssertionError("\n".join([*said, process.stderr.read()]))


class Browser:
    """Chromium without a window, which is told what to do through two pipes.

    Source: the Chrome DevTools Protocol; a message is JSON that ends with a zero byte.

    Args:
        width: Of the page, in pixels.
        height: Of the page, in pixels.
    """

    def __init__(self, width: int = 1246, height: int = 1050) -> None:
        self.events: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self._left = b""
        self._profile = tempfile.mkdtemp(prefix="board-profile-")
        self._process = self._start([*_FLAGS, f"--window-size={width},{height}"])
        try:
            self._open_page(width, height)
        except BaseException:
            self.close()
            raise

    def _open_page(self, width: int, height: int) -> None:
        target = self.ask("Target.createTarget", url="about:blank")
        session = self.ask("Target.attachToTarget", flatten=True, **target)
        self._session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Network", "Runtime"):
            self.ask(f"{domain}.enable")
        size = {"width": width, "height": height}
        self.ask("Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, mobile=False, **size)

    def _start(self, flags: Sequence[str]) -> int:
        """Starts it in a group of its own; it reads from 3 and writes to 4."""
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        # Out of the way of 3 and 4, which one of them may be.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read, write)]
        command = ["chromium", *flags, f"--user-data-dir={self._profile}", "about:blank"]
        process = os.posix_spawnp(
            "chromium",
            command,
            os.environ,
            file_actions=[
                *((os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in (0, 1, 2)),
                *((os.POSIX_SPAWN_DUP2, end, n) for end, n in zip(ends, (3, 4), strict=True)),
            ],
            setsid=True,
        )
        for end in (read, write, *ends):
            os.close(end)
        return process

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        limit = time.monotonic() + _SECONDS
        while b"\0" not in self._left:
            if not select.select([self._read], [], [], max(limit - time.monotonic(), 0))[0]:
                raise TimeoutError(f"chromium did not answer in {_SECONDS:.0f} s")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise EOFError("chromium has ended")
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def value(self, expression: str) -> Any:
        """What an expression in JavaScript is, on the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def until(self, expression: str, wanted: Any = True) -> Any:
        """Waits until an expression is as wanted; by default, is true."""
        limit = time.monotonic() + _SECONDS
        while (now := self.value(expression)) != wanted:
            if time.monotonic() > limit:
                raise TimeoutError(f"{expression}: still {now!r}; expected {wanted!r}.")
            time.sleep(0.1)
        return now

    def until_words(self, *words: str) -> None:
        """Waits until the page shows all these words."""
        self.until(f"{json.dumps(words)}.every(word => document.body?.innerText.includes(word))")

    def until_curves(self, count: int) -> None:
        """Waits until so many charts show curves of the first two runs."""
        self.until(f"({_COLOURS}).filter(counts => Math.min(...counts) > 20).length >= {count}")

    def until_still(self) -> None:
        """Waits until what is drawn does not change any more."""
        shown = ""
        limit = time.monotonic() + _SECONDS
        while (now := self.ask("Page.captureScreenshot")["data"]) != shown:
            if time.monotonic() > limit:
                raise TimeoutError("the page does not come to rest")
            shown = now
            time.sleep(0.5)

    def click(self, text: str) -> None:
        """Clicks what bears exactly this text."""
        find = f"[...document.querySelectorAll('*')].filter(e => e.textContent === {text!r}).pop()"
        self.until(f"Boolean({find})")
        self.value(f"{find}.click()")

    def open(self, address: str) -> None:
        """Goes to a page."""
        self.ask("Page.navigate", url=address)

    def requests(self) -> list[str]:
        """What the pages asked for, anywhere."""
        asked = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]

    def picture(self, path: Path) -> None:
        """Writes the page as it is to be seen, as PNG."""
        # Without a desktop there is no system font, which VisualDL asks for first.
        style = "<style>* {font-family: Arial, sans-serif !important}</style>"
        self.value(f"document.head.insertAdjacentHTML('beforeend', {style!r})")
        self.until_still()
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """Ends it and everything that it started."""
        with contextlib.suppress(OSError, EOFError, RuntimeError):
            self._session = {}
            self.ask("Browser.close")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)


def train(folder: Path, rate: float) -> None:
    """A run of the digits that shows more of itself."""
    import numpy as np
    from matplotlib.figure import Figure

    from expbase import main

    script = runpy.run_path(str(ROOT / "experiments/digits/train.py"))

    class Shown(script["Digits"]):  # type: ignore[misc]
        def compute_metrics(self, predicted: Any, labels: Any) -> dict[str, float]:
            self.confused = predicted, labels
            result: dict[str, float] = super().compute_metrics(predicted, labels)
            return result

        def on_evaluate_end(self, results: dict[str, float]) -> None:
            predicted, labels = self.confused
            images = np.concatenate([x.numpy() for x, _ in self.valid_loader])[:, 0]
            if len(labels) != len(images):
                return  # the test at the end
            table = np.zeros([10, 10])
            np.add.at(table, (labels, predicted), 1)
            figure = Figure(figsize=(4, 4), layout="constrained")
            axes = figure.subplots()
            axes.imshow(np.log1p(table), cmap="Blues")
            axes.set(xlabel="taken for", ylabel="is", xticks=range(10), yticks=range(10))
            show, now = self.visualizer, self.iteration
            show.add_figure("valid/confusion", figure, now)
            wrong = np.concatenate([images[predicted != labels], images])[:8]
            enlarged = np.kron(np.concatenate(list(wrong), axis=1), np.ones([12, 12]))
            show.add_image("valid/wrong", enlarged, now)
            show.add_histogram("weights/first", self.model[0].weight, now, buckets=30)

    words = [f"optim.lr={rate}", "training.log_interval=10", "training.valid_interval=50"]
    config = ROOT / "experiments/digits/config.yaml"
    main(Shown, argv=["--config", str(config), "--output", str(folder), "--device", "cpu", *words])


def pictures(browser: Browser, address: str, folder: Path) -> Iterator[Path]:
    """Writes a picture of each page."""

    def written(name: str) -> Path:
        browser.picture(folder / f"{name}.png")
        return folder / f"{name}.png"

    browser.open(f"{address}app/scalar")
    browser.until_curves(2)
    browser.click("valid")  # the first one, train, is open
    browser.until("document.querySelectorAll('canvas').length", 3)
    yield written("scalar")
    browser.open(f"{address}app/sample/image")
    browser.until("[...document.images].filter(i => i.naturalWidth > 90).length >= 2")
    yield written("image")
    browser.open(f"{address}app/histogram")
    browser.until("document.querySelectorAll('canvas').length", 2)
    yield written("histogram")
    browser.open(f"{address}app/hyper-parameter")
    browser.until_words("Trial ID", "optim/lr")
    yield written("hparams")
    browser.click("Parallel Coordinates View")
    browser.until("document.querySelectorAll('svg path.line').length", 2)
    yield written("parallel")
    browser.click("Scatter Plot Matrix View")
    browser.until("document.querySelectorAll('svg g.dots *').length", 2)
    yield written("scatter")


def main() -> int:
    """Trains, shows, takes pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--runs", type=Path, help="where the runs are kept (default: nowhere)")
    args = parser.parse_args()
    args.pictures.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        runs = args.runs or Path(opened.enter_context(tempfile.TemporaryDirectory()))
        for rate in (0.002, 0.0002):
            train(runs / f"lr={rate}", rate)
        shown = opened.enter_context(board(runs))
        browser = opened.enter_context(contextlib.closing(Browser()))
        for path in pictures(browser, shown.address, args.pictures):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

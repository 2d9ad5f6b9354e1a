"""The pictures of the docs, made anew from real runs of experiments/digits.

    python tests/docs_pictures.py promise live ls curves seeds elastic board

Each word makes one file in docs/; `elastic` needs etcd, and `board` chromium and a font for
Chinese (fonts-wqy-microhei). Commit first: `ls` shows the commit. Look at each picture afterwards:
nothing here can see. On an idle machine the recording is shorter.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import screens
from PIL import Image
from screens import Frame, Row
from terminal import Terminal, terminal

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COLUMNS = 96
TABLE_COLUMNS = 140
TRAIN = "python train.py --config config.yaml --output"
# What is typed; the first command is killed, and given again.
COMMANDS = (
    f"{TRAIN} a",
    f"{TRAIN} a",
    f"{TRAIN} b",
    "sha1sum */checkpoints/step-00000600/*.safetensors",
)
NOTES = {1: "the same command", 2: "the same run, never killed", 3: "the same bits"}
# What is shown of what the commands write.
KEPT = re.compile(
    r"train \d|.*Killed$|.* CONTINUING |.*\[300\] saved|.*\[600\] epoch|.* FINISHED|[0-9a-f]{40} "
)
GAP_SECONDS = 0.1  # longer waits are shortened to it
READ_SECONDS = 1.8  # at the end of a command
SHELL = {"PS1": "$ ", "PYTHONWARNINGS": "ignore"}
PLOTTED = ("runs/lr0.002", "runs/lr0.0002", "runs/lr0.02")


# --- the recording of the README -------------------------------------------------------------


class Recorder:
    """A shell, and what its screen showed when."""

    def __init__(self, shell: Terminal) -> None:
        self.shell = shell
        self.killed = ""  # what was typed elsewhere
        self.shown: list[tuple[float, list[Row]]] = []

    def wait(self, until: Callable[[str], object]) -> None:
        """Reads until the screen is as wanted, and keeps all that it showed."""

        def look(text: str) -> object:
            rows = story(text.splitlines(), self.killed)
            if rows and (not self.shown or rows != self.shown[-1][1]):
                self.shown.append((time.monotonic(), rows))
            return until(text)

        self.shell.wait(look)

    def give(self, command: str) -> None:
        """Types a command, word by word."""
        for word in re.findall(r"\S+\s?", command):
            self.shell.type(word)
            self.wait(lambda text, word=word: text.endswith(word.strip()))
            time.sleep(0.15)
        self.shell.type("\n")

    def frames(self) -> list[Frame]:
        """All that was seen, without long waits, but with time to read at the end of a command."""
        seconds = 0.0
        frames = []
        before = self.shown[0][0]
        for at, rows in self.shown:
            last = frames[-1].rows[-1].text if frames else ""
            reads = last == "$" and len(frames[-1].rows) > 1
            seconds += READ_SECONDS if reads else min(at - before, GAP_SECONDS)
            frames.append(Frame(round(seconds, 3), rows))
            before = at
        return frames


def story(lines: Sequence[str], killed: str = "") -> list[Row]:
    """The rows of a screen that are shown, with notes; one ⋮ for each command's other lines."""
    rows: list[Row] = []
    commands = 0
    shortened = True
    for line in lines:
        if line.startswith("$"):
            done = commands < len(COMMANDS) and line[2:] == COMMANDS[commands]
            note = NOTES.get(commands, "") if done else ""
            commands += 1
            shortened = False
        elif KEPT.match(line):
            note = killed if line.endswith("Killed") else ""
        elif shortened:
            continue
        else:
            line, note = "⋮", ""
            shortened = True
        rows.append(Row(line, f"← {note}" if note else ""))
    return rows


def promise(folder: Path) -> None:
    """docs/promise.svg: killed, continued, and the same as a run that was not."""
    expbase("new", "promise", "--from", "digits", cwd=folder)
    with shell_in(folder / "promise", rows=120) as shell:
        recorder = Recorder(shell)
        recorder.wait(at_prompt)
        first, again, other, digests = COMMANDS
        recorder.give(first)
        recorder.wait(lambda text: re.search(r"^train 3[2-9]\d/", text, re.M))
        process = child_of(shell.pid)
        recorder.killed = f"kill -9 {process}"
        os.kill(process, signal.SIGKILL)
        recorder.wait(at_prompt)
        for number, command in enumerate((again, other), 1):
            recorder.give(command)
            recorder.wait(lambda text, n=number: text.count("FINISHED") == n and at_prompt(text))
        recorder.give(digests)
        recorder.wait(lambda text: text.count(".safetensors") == 5 and at_prompt(text))
    write(DOCS / "promise.svg", screens.moving(recorder.frames(), COLUMNS))


def at_prompt(text: str) -> bool:
    return text.endswith("\n$") or text == "$"


def child_of(pid: int) -> int:
    """The process that a shell has started."""
    return int(subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, check=True).stdout)


# --- stills ----------------------------------------------------------------------------------


def live(folder: Path) -> None:
    """docs/live.svg: a terminal during training."""
    expbase("new", "live", "--from", "digits", cwd=folder)
    with shell_in(folder / "live") as shell:
        shell.wait(at_prompt)
        shell.type(f"{TRAIN} runs/digits\n")
        text = shell.wait(lambda text: re.search(r"^train 5[2-9]\d/", text, re.M))
        os.kill(child_of(shell.pid), signal.SIGKILL)
    write(DOCS / "live.svg", screens.still(text.splitlines(), COLUMNS))


def ls(folder: Path) -> None:
    """docs/ls.svg: the table of six runs."""
    runs(folder)
    running = started(folder, "data.batch_size=16")
    lines_of(folder / "runs/batch16", 12)
    os.kill(running.pid, signal.SIGSTOP)  # it stays where it is
    ended(folder, 8, signal.SIGKILL)
    ended(folder, 64, signal.SIGTERM)
    try:
        with shell_in(folder, columns=TABLE_COLUMNS) as shell:
            shell.wait(at_prompt)
            shell.type("python -m expbase ls runs\n")
            text = shell.wait(lambda text: "lr0.02 " in text and at_prompt(text))
    finally:
        running.kill()
        running.wait()
    write(DOCS / "ls.svg", screens.still(text.splitlines()[:-1], TABLE_COLUMNS))


def ended(folder: Path, batch_size: int, number: signal.Signals) -> None:
    """A run that ends by a signal."""
    process = started(folder, f"data.batch_size={batch_size}")
    lines_of(folder / f"runs/batch{batch_size}", 15 + batch_size // 4)
    process.send_signal(number)
    process.wait()


def started(folder: Path, word: str, seed: int | None = None) -> subprocess.Popen[bytes]:
    """A run of digits with another value, and perhaps seed, in a directory of that name."""
    key = word.partition("=")[0]
    script = ROOT / "experiments/digits/train.py"
    output = f"runs/{'lr' if 'lr' in key else 'batch'}{{{key}}}"
    words = [script, "--config", script.parent / "config.yaml"]
    words += ["training.log_interval=10", word]
    if seed is not None:
        output += "-{training.seed}"
        words.append(f"training.seed={seed}")
    words += ["--output", output]
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=folder, env=quiet())


def lines_of(run: Path, count: int) -> None:
    """Waits until a run has logged so many lines."""
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        time.sleep(0.05)


def runs(folder: Path) -> None:
    """Three finished runs."""
    for lr in ("0.002", "0.0002", "0.02"):
        if not (folder / f"runs/lr{lr}").exists():
            assert started(folder, f"optim.lr={lr}").wait() == 0


def curves(folder: Path) -> None:
    """docs/curves.png, by `plot`."""
    runs(folder)
    expbase("plot", *PLOTTED, "--output", str(DOCS / "curves.png"), cwd=folder)
    reduce(DOCS / "curves.png")


def seeds(folder: Path) -> None:
    """docs/seeds.png, by `plot`: three seeds each of two learning rates."""
    for lr in ("0.002", "0.0005"):
        for seed in (1, 2, 3):
            assert started(folder, f"optim.lr={lr}", seed).wait() == 0
    words = ["--metrics", "train/loss", "valid/accuracy", "--output", str(DOCS / "seeds.png")]
    expbase("plot", *(str(run) for run in sorted(folder.glob("runs/lr*-?"))), *words, cwd=folder)
    reduce(DOCS / "seeds.png")


def elastic(folder: Path) -> None:
    """docs/elastic.png: a cluster that shrinks and grows, and its loss; some minutes."""
    sys.path.insert(0, str(ROOT / "tests/proofs"))
    os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
    from clusters import shrinks_and_grows

    changed, whole, made = shrinks_and_grows(folder, count=7, seed=8, between=(20, 40))
    draw_elastic(changed.output, whole.output, made)
    reduce(DOCS / "elastic.png")


def draw_elastic(changed: Path, whole: Path, made: Sequence[Any]) -> None:
    """Draws processes over time, and the loss over iterations beside that of one process."""
    from changes import BACK, periods
    from compare import logged
    from matplotlib.figure import Figure

    colours = {1: "#d95f02", 2: "#1b6ca8"}
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    top, bottom = figure.subplots(2, height_ratios=(2, 3))
    found = periods(changed)
    for period in found:
        begin, end = period.begin - found[0].begin, period.end - found[0].begin
        top.bar(begin, period.processes, end - begin, align="edge", color=colours[period.processes])
    for change in made:
        at = change.at - found[0].begin
        top.plot(at, 2.3, marker="^" if change.change.what == BACK else "x", color="#333333")
    top.plot([], [], "x", color="#333333", label="kill -9 or SIGTERM, of a launcher or a rank")
    top.plot([], [], "^", color="#333333", label="a node comes back")
    top.set(xlabel="seconds", ylabel="processes", ylim=(0, 3.6), yticks=(0, 1, 2))
    top.legend(loc="upper left", ncols=2, frameon=False, fontsize="small")
    reference = [(line["iteration"], line["train/loss"]) for line in with_loss(logged(whole))]
    bottom.plot(
        *zip(*reference, strict=True), color="#cccccc", lw=5, label="one process, left alone"
    )
    # The updates that stayed: of a period those before the next one began.
    ends = [period.first for period in found[1:]] + [found[-1].last + 1]
    lines = [(line["iteration"], line["train/loss"]) for line in with_loss(logged(changed))]
    for period, end in zip(found, ends, strict=True):
        points = [point for point in lines if period.first - 5 <= point[0] < end]
        bottom.plot(*zip(*points, strict=True), color=colours[period.processes], lw=1.2)
    for number, colour in colours.items():
        label = f"the cluster, while {number} train" + "s" * (number == 1)
        bottom.plot([], [], color=colour, label=label)
    bottom.set(xlabel="iterations", ylabel="loss")
    bottom.legend(frameon=False, fontsize="small")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "elastic.png", dpi=110)


def with_loss(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "train/loss" in line]


def board(folder: Path) -> None:
    """docs/board.png, by `board` and a browser."""
    fonts = subprocess.run(["fc-list", ":lang=zh"], capture_output=True, check=True).stdout
    assert fonts, "no font for Chinese: VisualDL's choice of a language would show a box"
    shutil.rmtree(folder / "runs", ignore_errors=True)
    for run in PLOTTED:  # not to their ends: of several groups the first is open, and a test's is
        process = started(folder, f"optim.lr={run.removeprefix('runs/lr')}")
        lines_of(folder / run, 62)
        process.send_signal(signal.SIGTERM)
        process.wait()
    words = [sys.executable, "-m", "expbase", "board", str(folder / "runs"), "--port", "0"]
    with terminal(words, 200) as shown:
        text = shown.wait(lambda text: "Ctrl-C" in text)
        (address,) = re.findall(r"(http://\S+) \(Ctrl-C", text)
        while True:  # until it answers
            with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=3):
                break
            time.sleep(0.1)
        options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --lang=en"
        size = "--window-size=1400,840 --virtual-time-budget=20000"
        picture = f"--screenshot={DOCS / 'board.png'}"
        words = ["chromium", *options.split(), *size.split(), picture, address]
        subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    reduce(DOCS / "board.png")


# --- what they need --------------------------------------------------------------------------


def shell_in(folder: Path, columns: int = COLUMNS, rows: int = 60) -> Iterator[Terminal]:
    """A shell in a folder."""
    os.chdir(folder)
    words = ["/bin/bash", "--norc", "--noprofile", "-i"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return terminal(words, columns, rows, **SHELL, PATH=path)


def expbase(*words: str, cwd: Path) -> None:
    subprocess.run([sys.executable, "-m", "expbase", *words], cwd=cwd, env=quiet(), check=True)


def quiet() -> dict[str, str]:
    return {**os.environ, **SHELL}


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    print(f"{path.name}: {len(text.encode()):,} bytes")


def reduce(path: Path) -> None:
    """Gives a picture 64 colours, which makes its file a third."""
    Image.open(path).quantize(64).save(path, optimize=True)


def main(names: Sequence[str]) -> None:
    makers = {maker.__name__: maker for maker in (promise, live, ls, curves, seeds, elastic, board)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in names:
            makers[name](Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])

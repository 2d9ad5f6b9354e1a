"""Two runs of the digits on the board, as a browser shows them: pictures of its pages.

python tests/proofs/board.py PICTURES    # needs chromium on the PATH
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-sync", "--hide-scrollbars", "--window-size=1246,1050",
)  # fmt: skip


def train(folder: Path, rate: float) -> None:
    """Trains the digits."""
    script = ROOT / "experiments/digits/train.py"
    words = ["--config", str(script.with_name("config.yaml")), "--output", str(folder)]
    words += ["--device", "cpu", f"optim.lr={rate}", "training.log_interval=10"]
    subprocess.run([sys.executable, str(script), *words], cwd=ROOT, check=True)


def wait_for(port: int) -> None:
    """Returns when somebody listens."""
    while True:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)


def picture(address: str, path: Path, profile: Path) -> None:
    """Writes a page as PNG, once it has had 10 s of its own time to ask for data and draw."""
    command = ["chromium", *_FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=10000"]
    subprocess.run([*command, f"--screenshot={path}", address], check=True, timeout=60)


def main() -> int:
    """Trains, shows, takes pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pictures", type=Path)
    pictures = parser.parse_args().pictures.absolute()
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary, "runs")
        for rate in (0.002, 0.0002):
            train(runs / f"lr={rate}", rate)
        command = [sys.executable, "-m", "expbase", "board", str(runs), "--port", "0"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as board:
            assert board.stdout
            address = board.stdout.readline().split()[0].removesuffix("scalar")
            try:
                wait_for(int(address.split(":")[2].partition("/")[0]))
                profile = Path(temporary, "profile")
                picture(f"{address}scalar", pictures / "scalar.png", profile)
            finally:
                board.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())

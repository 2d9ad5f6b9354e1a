"""Proves that each experiment reaches what its config file says, and continues to the same bits.

Each is run whole, as a user would run it; then `python -m expbase verify` kills and compares it. At
the end the rows of the gallery's table are printed, in both languages, with the figures reached.

    python tests/proofs/experiments.py [--only charlm] [--keep DIR] [--rows]

`--keep` leaves the runs in a directory, for tests/gallery.py, and takes those that are there;
`--rows` does without the kills.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from compare import logged

ROOT = Path(__file__).parents[2]
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Claim:
    """What an experiment should reach in its test, or else its last validation, and its row.

    A row is what it does and on which data, the figures, and the best that is possible or published
    (whose source stands in the config file), or what has to be beaten where nobody knows one.
    """

    reached: Callable[[Figures], bool]
    row: str
    row_zh: str
    config: str = "config.yaml"
    words: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()  # to train on the first number of them, and to verify on all
    of_verify: tuple[str, ...] = ()


# So that the 40 iterations of verify hold all that the experiment does, and its checkpoints (each
# fifth) what LBFGS remembers: it forgets when points are drawn, after iterations 13, 20, 27, 34.
_BOTH_PHASES = ("adam.iterations=13", "lbfgs.steps=5", "lbfgs.redraw_interval=7")
CLAIMS = {
    "line": Claim(
        lambda f: f["error"] < 1e-4,
        "a straight line, made up: the script of the README | within {error:.0e} | 0",
        "直线：README 里的脚本 | 误差 {error:.0e} | 0",
    ),
    "digits": Claim(
        lambda f: f["accuracy"] >= 0.97,
        "handwritten digits of scikit-learn, a convolutional net"
        " | accuracy {accuracy:.3f} | 0.981, an SVM",
        "手写数字 | 准确率 {accuracy:.3f} | 0.981，SVM",
    ),
    "cifar": Claim(
        lambda f: f["accuracy"] >= 0.9,
        "images: ten shapes that a script draws, a small net | accuracy {accuracy:.3f}"
        " | 0.1, guessing",
        "图像：脚本画的十种图形，小网络 | 准确率 {accuracy:.3f} | 0.1，随机猜",
        config="small.yaml",
        ranks=(2, 1),
    ),
    "charlm": Claim(
        lambda f: f["bits_per_character"] <= min(2.75, f["trigram_bits_per_character"]),
        "a language model of characters, of Python's own source"
        " | {bits_per_character:.2f} bits | {trigram_bits_per_character:.2f}, trigrams",
        "字符语言模型 | {bits_per_character:.2f} 比特 | {trigram_bits_per_character:.2f}，三元模型",
    ),
    "multitask": Claim(
        lambda f: f["tags_accuracy"] >= 0.92 and f["kinds_accuracy"] >= 0.95,
        "tagging and classification, two heads, lines of Python's source"
        " | accuracy {tags_accuracy:.3f}, {kinds_accuracy:.3f} | 0.54, 0.34, the most frequent",
        "标注和分类，两个任务头"
        " | 准确率 {tags_accuracy:.3f}，{kinds_accuracy:.3f} | 0.54，0.34，最常见类别",
    ),
    "ctr": Claim(
        lambda f: f["auc"] >= f["bayes_auc"] - 0.02,
        "advertising: clicks from a known model; sparse features, YAML runs"
        " | AUC {auc:.3f} | {bayes_auc:.3f}, Bayes",
        "点击率，已知分布；YAML | AUC {auc:.3f} | {bayes_auc:.3f}，贝叶斯",
    ),
    "gan": Claim(
        lambda f: f["modes"] == 8,
        "generative models: a GAN on eight Gaussians; two optimizers"
        " | {modes:.0f} modes, {quality:.2f} good | 8 modes",
        "GAN，八个高斯分布 | {modes:.0f} 个峰，{quality:.2f} 合格 | 8 个峰",
    ),
    "flow": Claim(
        lambda f: -0.02 <= f["nll"] - f["entropy"] <= 0.05,
        "densities: a normalizing flow on a stream whose entropy is known"
        " | {nll:.3f} nat | {entropy:.3f}, the entropy",
        "归一化流，已知熵的数据流 | {nll:.3f} nat | {entropy:.3f}，熵",
    ),
    "cartpole": Claim(
        lambda f: f["return"] >= 475,
        "[reinforcement learning](reinforcement.md): PPO on CartPole-v1"
        " | return {return:.0f} of 500 | 500.0, RL Zoo",
        "[强化学习](reinforcement.zh.md)：PPO | 回报 {return:.0f} / 500 | 500.0，RL Zoo",
    ),
    "pinn": Claim(
        lambda f: f["error"] <= 0.005,
        "computational physics: Burgers' equation; Adam, then LBFGS"
        " | L2 {error:.4f} | 0.00067, Raissi 2019",
        "PINN：Burgers 方程 | L2 {error:.4f} | 0.00067，Raissi 2019",
        of_verify=_BOTH_PHASES,
    ),
    "pinn, inverse": Claim(
        lambda f: f["lambda_1_percent"] <= 0.2 and f["lambda_2_percent"] <= 2,
        "the same, inverse: its two coefficients from measurements"
        " | within {lambda_1_percent:.3f} %, {lambda_2_percent:.2f} %"
        " | 0.096 %, 0.469 %, Raissi 2019",
        "反问题：两个系数"
        " | 误差 {lambda_1_percent:.3f} %，{lambda_2_percent:.2f} %"
        " | 0.096 %，0.469 %，Raissi 2019",
        words=("problem=inverse",),
        of_verify=_BOTH_PHASES,
    ),
}
_STEPS = (5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240)  # s, in the table


@dataclass(frozen=True)
class Reached:
    """What a run has reached."""

    figures: Figures
    seconds: int
    good: bool


def row(name: str, *, chinese: bool = False) -> str:
    """Returns a row of the table of docs/gallery.md, to be formatted with figures and `seconds`."""
    claim = CLAIMS[name]
    link = f"[{name}](../experiments/{_folder(name).name}/train.py)"
    return f"| {link} | {claim.row_zh if chinese else claim.row} | {{seconds}} s |"


def rounded(seconds: float) -> int:
    """Returns the time that the table says, rounded up."""
    return next((step for step in _STEPS if seconds <= step), math.ceil(seconds / 60) * 60)


def holds(name: str, shown: str, *, chinese: bool = False) -> bool:
    """Tells whether a row of that table is of this experiment, and reaches what is claimed."""
    pattern = re.escape(row(name, chinese=chinese))
    found = re.fullmatch(re.sub(r"\\{(\w+)(:.*?)?\\}", r"(?P<\1>[-\\w.]+)", pattern), shown)
    if not found:
        return False
    figures = {key: float(figure) for key, figure in found.groupdict().items()}
    return CLAIMS[name].reached(figures) and figures["seconds"] in _STEPS


def _folder(name: str) -> Path:
    """Returns the folder of an experiment, which is the first word of its name here."""
    return ROOT / "experiments" / name.split(",")[0]


def _words(name: str, folder: Path) -> list[str]:
    """The words of its command line; the config file of ctr is for the runner."""
    claim = CLAIMS[name]
    words = [] if name == "ctr" else ["--config", str(_folder(name) / claim.config)]
    if name == "cifar":
        archive = folder / "shapes.tar.gz"
        subprocess.run([sys.executable, str(_folder(name) / "shapes.py"), str(archive)], check=True)
        words.append(f"data.archive={archive}")
    return [*words, *claim.words]


def run(name: str, folder: Path) -> Reached:
    """Runs one experiment whole, unless its run is there, with its end."""
    output = folder / name
    claim = CLAIMS[name]
    words = [*_words(name, folder), "--output", str(output)]
    words += ["--nprocs", str(claim.ranks[0])] if claim.ranks else []
    if not (output / "seconds").exists():
        command = [sys.executable, str(_folder(name) / "train.py"), *words, "--fresh"]
        began = time.monotonic()
        subprocess.run(command, check=True, capture_output=True, timeout=900)
        (output / "seconds").write_text(f"{time.monotonic() - began:.0f}")
    seconds = int((output / "seconds").read_text())
    figures = {**_validated(output), **_tested(output)}
    good = claim.reached(figures)
    print(f"{name}: {json.dumps(figures)} in {seconds} s: {good}", flush=True)
    return Reached(figures, seconds, good)


def _validated(output: Path) -> Figures:
    """Returns the figures of the last validation."""
    lines = [line for line in logged(output) if any(key.startswith("valid/") for key in line)]
    return {k.removeprefix("valid/"): v for k, v in lines[-1].items() if k.startswith("valid/")}


def _tested(output: Path) -> Figures:
    """Returns the figures of the test at the end; none without a test."""
    lines = [line for line in logged(output) if any(key.startswith("test/") for key in line)]
    last = lines[-1] if lines else {}
    return {k.removeprefix("test/"): v for k, v in last.items() if k.startswith("test/")}


def verify(name: str, folder: Path) -> bool:
    """Kills and compares one experiment."""
    claim = CLAIMS[name]
    command = [sys.executable, "-m", "expbase", "verify", str(_folder(name) / "train.py")]
    command += ["--output", str(folder / f"{name}-verified")]
    command += ["--ranks", ",".join(map(str, claim.ranks))] if claim.ranks else []
    command += ["--", *_words(name, folder), *claim.of_verify]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    print(f"{name}: {(result.stdout.strip() or result.stderr.strip()).splitlines()[-1]}")
    return result.returncode == 0


def run_yaml(folder: Path) -> bool:
    """Runs the runners of ctr's YAML; tells whether the warm start beats the cold one."""
    words = ["run", str(ROOT / "experiments/ctr/config.yaml"), "--output", str(folder / "yaml")]
    command = [sys.executable, "-m", "expbase", *words]
    began = time.monotonic()
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    seconds = time.monotonic() - began
    first = {
        name: next(
            line["valid/auc"] for line in logged(folder / "yaml" / name) if "valid/auc" in line
        )
        for name in ("warm", "cold")
    }
    inferred = [json.loads(line) for line in result.stdout.splitlines()]
    good = first["warm"] > first["cold"] and len(inferred) == 3
    print(
        f"ctr, YAML: first pass {first}, inferred {[round(x['auc'], 4) for x in inferred]} "
        f"in {seconds:.0f} s: {good}"
    )
    return good


def main() -> None:
    """Runs the proof; the exit code says whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(CLAIMS))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the runs stay")
    parser.add_argument("--rows", action="store_true", help="train, and verify nothing")
    args = parser.parse_args()
    names = [args.only] if args.only else [*CLAIMS]
    held: list[bool] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = args.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        runs = {name: run(name, folder) for name in names}
        held += [result.good for result in runs.values()]
        if not args.rows:
            held += [verify(name, Path(temporary)) for name in names]
            held += [run_yaml(Path(temporary))] if "ctr" in names else []
    for chinese in (False, True):
        for name, result in runs.items():
            seconds = rounded(result.seconds)
            print(row(name, chinese=chinese).format(**result.figures, seconds=seconds))
    print(f"{sum(held)} of {len(held)} hold")
    sys.exit(sum(held) < len(held))


if __name__ == "__main__":
    main()

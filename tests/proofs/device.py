"""Proves on a device that is not the CPU what the tests prove on the CPU and on a pretend device.

Whoever has a GPU for ten minutes runs it as it stands. The cheap and telling checks come first.
Each has a limit of time and one line: its name, "ok", "FAILED" or "not here", and its figures or
the reason; none keeps the others from running. The experiment is that of on_device.py, whose
processes are the only ones that touch the device.

    python tests/proofs/device.py gpu
    python tests/proofs/device.py cpu --short --only repeatable draws
    python tests/proofs/device.py intel_hpu --short        # the pretend device of the tests
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.simplefilter("ignore")

import forks  # noqa: E402
import pretend  # noqa: E402
from compare import differences, last_checkpoint, logged  # noqa: E402
from on_device import KILLED, RESULT, net_for  # noqa: E402
from watched import Watched  # noqa: E402

from expbase.base.arrays import parse  # noqa: E402
from expbase.base.device import kind_of  # noqa: E402
from expbase.checkpoint import layout, storage  # noqa: E402

SCRIPT = Path(__file__).with_name("on_device.py")
KILLED_AT, SAVED_AT = 15, 12  # iterations
GONE_SECONDS = 20.0
AMP = ("float16-O1", "float16-O2", "bfloat16-O2")


class FailedError(Exception):
    """A check has found something that is wrong."""


class NotHereError(Exception):
    """This device cannot do what a check is about."""


class Proof:
    """What the checks have in common.

    Args:
        device: The word for --device.
        folder: Takes the runs of one check.
        seconds: After which the check is ended.
        options: Those of the command.
    """

    def __init__(self, device: str, folder: Path, seconds: float, options: Any) -> None:
        self.device, self.folder, self.options = device, folder, options
        self.kind = kind_of(device)
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        folder.mkdir()

    def output(self, name: str) -> Path:
        """The directory of a run."""
        return self.folder / name

    @contextmanager
    def started(
        self, name: str, *words: str, **variables: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A command of this interpreter; nothing of it is left afterwards."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
        watched = Watched([sys.executable, *words], self.said_by(name), environment)
        with watched.started() as process:
            yield process
            watched.seconds_until_gone(GONE_SECONDS)

    def said_by(self, name: str) -> Path:
        """The file with what the starts of a run have printed."""
        return self.folder / f"{name}.txt"

    def tail(self, name: str, lines: int = 1) -> str:
        """Its last lines."""
        said = self.said_by(name).read_text(errors="replace").splitlines()
        return " | ".join([line.strip() for line in said if line.strip()][-lines:])

    def wait(self, process: subprocess.Popen[bytes], name: str) -> int:
        """How a process has ended, within the limit of the check."""
        try:
            return process.wait(max(self._deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            raise FailedError(
                f"{name} ran into the limit of {self._seconds:.0f} s; it said: {self.tail(name, 3)}"
            ) from None

    def code(self, name: str, *words: str, **variables: str) -> int:
        """How a command of this interpreter ends."""
        with self.started(name, *words, **variables) as process:
            return self.wait(process, name)

    def words(self, name: str, *words: str, device: str = "") -> list[str]:
        """The command that trains."""
        command = [str(SCRIPT), "--output", str(self.output(name))]
        return [*command, "--device", device or self.device, *words]

    def train(self, name: str, *words: str, device: str = "", **variables: str) -> Path:
        """A run, or a further start of one, which must come to its end."""
        self.ended_well(
            name, self.code(name, *self.words(name, *words, device=device), **variables)
        )
        return self.output(name)

    def ended_well(self, name: str, code: int) -> None:
        """Says how a run ended if it is not the end of the training."""
        if code:
            raise FailedError(f"{name} ended with {code}: {self.tail(name, 3)}")

    def continued(self, name: str, *words: str) -> Path:
        """A run of which a process was killed by `kill -9`, and which was continued."""
        code = self.code(name, *self.words(name, *words), ON_DEVICE=f"kill {KILLED_AT}")
        if not (self.output(name) / KILLED).exists():
            raise FailedError(f"{name} ended with {code}, not killed: {self.tail(name, 3)}")
        return self.train(name, *words)

    def measured(self, name: str, *words: str) -> str:
        """What a measurement of on_device.py has found."""
        command = [str(SCRIPT), name, self.device, "--output", str(self.output(name)), *words]
        self.ended_well(name, self.code(name, *command))
        said = self.said_by(name).read_text(errors="replace")
        text = re.findall(rf"^{RESULT}(.*)", said, re.MULTILINE)[-1]
        if text.startswith("not here: "):
            raise NotHereError(text.removeprefix("not here: "))
        if "FAILED: " in text:
            raise FailedError(text.replace("FAILED: ", ""))
        return text

    def same(self, one: Path, other: Path, what: str) -> None:
        """Fails if two runs did not end with the same bits and numbers."""
        if wrong := differences(one, other):
            raise FailedError(f"{what}: {'; '.join(wrong)}")


# --- checks ----------------------------------------------------------------------------------


def flags(proof: Proof) -> str:
    """What there is."""
    return proof.measured("flags")


def repeatable(proof: Proof) -> str:
    """The same training twice, in two processes."""
    runs = [proof.train(f"with-{number}") for number in range(2)]
    proof.same(*runs, "training.deterministic=True")
    if proof.options.short:
        return "the same bits twice"
    free = [proof.train(f"without-{n}", "training.deterministic=False") for n in range(2)]
    text = "not the same" if differences(*free) else "the same, too"
    return f"the same bits twice with training.deterministic; without it {text}"


def verify(proof: Proof) -> str:
    """The tool that users have."""
    words = ["-m", "expbase", "verify", str(SCRIPT), "--output", str(proof.output("runs"))]
    words += ["--kills", "1" if proof.options.short else "6", "--", "--device", proof.device]
    code = proof.code("verify", *words)
    if code:
        raise FailedError(f"ended with {code}: {proof.tail('verify', 3)}")
    return proof.tail("verify")


def amp(proof: Proof) -> str:
    """Each kind of mixed precision, straight and continued."""
    if proof.kind == "cpu":
        raise NotHereError("on the CPU paddle's amp has no effect")
    there = proof.measured("halves").split()
    if there == ["none"]:
        raise NotHereError("it has neither float16 nor bfloat16")
    texts = []
    for kind in AMP:
        if kind.partition("-")[0] not in there:
            texts.append(f"{kind} is not here")
            continue
        words = [f"model.net={net_for(proof.device)}", f"model.amp={kind}"]
        straight = proof.train(f"{kind}-straight", *words)
        proof.same(proof.continued(f"{kind}-continued", *words), straight, kind)
        texts.append(f"{kind}, {amp_facts(kind, straight)}")
    return f"the same bits straight and continued; {'; '.join(texts)}"


def amp_facts(kind: str, output: Path) -> str:
    """What a run in 16 bits must have shown, else it proves nothing."""
    dtype, _, level = kind.partition("-")
    facts = []
    if level == "O2":
        weights, of_optimizer = (
            parse((last_checkpoint(output) / f"{name}.safetensors").read_bytes())
            for name in ("model", "optimizer")
        )
        masters = {key: array for key, array in of_optimizer.items() if "master_weight" in key}
        types = {array.dtype for array in masters.values()}
        if dtype not in {array.dtype for array in weights.values()} or types != {"float32"}:
            raise FailedError(f"{kind}: the weights are no {dtype}, or the master weights {types}")
        facts.append(f"{len(masters)} master weights of float32")
    if dtype == "float16":
        scales = [line["train/scale"] for line in logged(output) if "train/scale" in line]
        skipped = sum(now < then for then, now in itertools.pairwise(scales))
        if not skipped:
            raise FailedError(f"{kind}: no update was skipped; scales: {scales}")
        facts.append(f"{skipped} updates skipped")
    return ", ".join(facts)


def draws(proof: Proof) -> str:
    """Draws on the device, straight and continued."""
    straight = proof.train("straight")
    proof.same(proof.continued("continued"), straight, "straight and continued")
    who = notes(straight)[-1]["drawn_by"]
    text = f"the same bits; drawn by the generator of {who}"
    if who != proof.kind:
        raise FailedError(f"{text}, not of {proof.kind}")
    return text


def notes(output: Path) -> list[dict[str, Any]]:
    """What the starts of a run have written down, on rank 0."""
    return [json.loads(line) for line in (output / "notes_0").read_text().splitlines()]


def speed(proof: Proof) -> str:
    """The time of an update against that of a bare loop."""
    words = ["--steps=20", "--rounds=1"] * proof.options.short
    if proof.kind in ("cpu", pretend.NAME):  # which the wide net would keep busy for minutes
        words.append(
            "--wide=512" if proof.kind == "cpu" and not proof.options.short else "--wide=0"
        )
    return proof.measured("speed", *words)


def waits(proof: Proof) -> str:
    """Waits for the device."""
    return proof.measured("waits")


def save(proof: Proof) -> str:
    """A large checkpoint; smaller where memory or disk are."""
    return proof.measured("save", "--megabytes", str(proof.options.megabytes))


def moved(proof: Proof) -> str:
    """A checkpoint that goes from the device to the CPU and back."""
    for until, device in ((6, proof.device), (12, "cpu"), (18, proof.device)):
        proof.train("moved", f"training.max_iteration={until}", "--force", device=device)
    lines = notes(proof.output("moved"))
    for end, begin in ((1, 2), (3, 4)):
        if lines[end]["weights"] != lines[begin]["weights"]:
            raise FailedError(f"{lines[end]['device']} to {lines[begin]['device']}: other weights")
    return f"the same bits of the weights on {', '.join(line['device'] for line in lines[::2])}"


def memory(proof: Proof) -> str:
    """More than there is."""
    straight = proof.train("straight")
    code = proof.code("memory", *proof.words("memory"), ON_DEVICE=f"exhaust {KILLED_AT}")
    if code == 0:
        raise NotHereError("an array of 4 TB was given")
    newest = last_checkpoint(proof.output("memory"))
    storage.verify(newest)
    said = proof.said_by("memory").read_text(errors="replace")
    errors = re.findall(r"^(?:\w*(?:Error|Mistake): .|Out of memory error).*", said, re.MULTILINE)
    if code != 1 or layout.iteration_of(newest) != SAVED_AT or not errors:
        raise FailedError(f"ended with {code} and {newest.name}: {proof.tail('memory', 3)}")
    if proof.kind in ("cpu", "gpu", "xpu") and "Out of memory in an update" not in said:
        raise FailedError(f"no word about memory: {proof.tail('memory', 3)}")
    proof.same(proof.train("memory"), straight, "continued after it")
    return f"{errors[-1]} {newest.name} is good and continues to the same bits"


def cards(proof: Proof) -> str:
    """Two processes, each with a card of its own."""
    number = int(proof.measured("count"))
    if number < 2 and proof.kind != "cpu":
        raise NotHereError(f"{number} {proof.kind} is there; expected two")
    two = ("--nprocs", "2")
    proof.device = proof.kind  # each rank takes a card of its own
    straight = proof.train("straight", *two)
    logs = ["--log_dir", str(proof.folder / "logs")]
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", *logs]
    proof.ended_well("launched", proof.code("launched", *launcher, *proof.words("launched")))
    proof.same(proof.output("launched"), straight, "paddle's launcher")
    proof.same(proof.continued("killed", *two), straight, "a killed rank")
    return "the same bits by --nprocs 2, paddle's launcher, and after a rank was killed"


CHECKS: dict[str, tuple[float, Callable[[Proof], str]]] = {
    "flags": (60, flags),
    "repeatable": (150, repeatable),
    "verify": (240, verify),
    "amp": (240, amp),
    "draws": (90, draws),
    "speed": (120, speed),
    "waits": (90, waits),
    "save": (180, save),
    "moved": (90, moved),
    "memory": (120, memory),
    "cards": (240, cards),
}


def result(proof: Proof, function: Callable[[Proof], str]) -> tuple[str, str]:
    """How a check went, and what is to be said about it."""
    try:
        return "ok", function(proof)
    except NotHereError as reason:
        return "not here", str(reason)
    except Exception as error:  # whatever it is, the next check runs
        text = str(error) if isinstance(error, FailedError) else repr(error)
        return "FAILED", text


def main() -> None:
    """Prints a line for each check, and how many held; exit code 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", help="gpu, gpu:1, xpu, cpu …, as --device has it")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=[*CHECKS])
    parser.add_argument("--short", action="store_true", help="smaller, for the tests")
    parser.add_argument("--megabytes", type=int, default=0, help="of a large checkpoint")
    args = parser.parse_args()
    args.megabytes = args.megabytes or (16 if args.short else 4096)
    kind = kind_of(args.device)
    if kind == pretend.NAME:
        os.environ.update(pretend.environment())
    # What docs/config.md asks for beside training.deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Tree")
    if args.short and kind in ("cpu", pretend.NAME):
        subprocess.Popen = forks.Popen  # type: ignore[misc]  # a real device cannot be forked
    folder = Path(tempfile.mkdtemp(prefix="device-"))
    counted = dict.fromkeys(("ok", "FAILED", "not here"), 0)
    for name in args.only:
        seconds, function = CHECKS[name]
        began = time.monotonic()
        how, text = result(Proof(args.device, folder / name, seconds, args), function)
        counted[how] += 1
        line = " ".join(text.split())
        print(f"{name:<11}{how:<9} {line} ({time.monotonic() - began:.0f} s)", flush=True)
    print(", ".join(f"{number} {how}" for how, number in counted.items()))
    if counted["FAILED"]:
        print(f"what they have written and said is in {folder}")
    else:
        shutil.rmtree(folder)
    sys.exit(bool(counted["FAILED"]))


if __name__ == "__main__":
    main()

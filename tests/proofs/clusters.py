"""Proves that a run goes on under etcd, Slurm and Kubernetes as docs/clusters.md says.

The recipes are taken from that page. etcd and the pid namespaces are real; Slurm and Kubernetes are
played (players.py). Each case disturbs a run in one way, over and over, lets the scheduler start it
again, and compares the bits at its end with a run that nobody disturbed. Afterwards no process may
be left. What this machine lacks is skipped, and a line says so.

    python tests/proofs/clusters.py [--only etcd slurm kubernetes] [--rounds 2] [--case NAME]
    python tests/proofs/clusters.py --only etcd --case shrinks [--changes 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from changes import Changes, Made, periods, planned, rank_process
from compare import differences, ledger
from elastic import HURRY
from players import (
    LONG_SECONDS,
    PROOFS,
    Etcd,
    Job,
    Pod,
    Slurm,
    kill,
    namespaces,
    recipe,
    shown,
    wait_for,
)

ITERATIONS = 300
ELASTIC = (PROOFS / "elastic.py").read_text(encoding="utf-8")
CASES: dict[str, list[Callable[[Proof], None]]] = {"etcd": [], "slurm": [], "kubernetes": []}


class Proof:
    """The folder of the cases, and the runs that they are compared with."""

    changes = 20  # of the cluster that shrinks and grows
    seed = 0

    def __init__(self, folder: Path, rounds: int, iterations: int = ITERATIONS) -> None:
        self.folder, self.rounds, self.iterations = folder, rounds, iterations
        self._whole: dict[int, Path] = {}
        self._number = 0

    def job(self, *, workers: int = 0, nodes: int = 1) -> Job:
        """A new one."""
        self._number += 1
        return Job(self.folder / f"job-{self._number}", self.iterations, workers, nodes)

    def whole(self, ranks: int) -> Path:
        """The output of a run that nobody disturbed; the number of workers changes no bit."""
        if ranks not in self._whole:
            job = Job(self.folder / f"whole-{ranks}", self.iterations)
            words = [sys.executable, "train.py", "--output", str(job.output), "--device", "cpu"]
            with job.watched([*words, "--nprocs", str(ranks)]).started() as process:
                assert process.wait(LONG_SECONDS) == 0, job.log.read_text()[-2000:]
            self._whole[ranks] = job.output
        return self._whole[ranks]

    def compare(self, job: Job, ranks: int) -> None:
        """Raises an AssertionError if the run does not end as the whole one does."""
        assert job.finished(), ledger(job.output, "end")
        # How many workers there are is a part of the config, and of no state.
        assert differences(job.output, self.whole(ranks)) == []


def case(scheduler: str) -> Callable[[Callable[[Proof], None]], Callable[[Proof], None]]:
    """Adds a case to those of a scheduler."""

    def add(function: Callable[[Proof], None]) -> Callable[[Proof], None]:
        CASES[scheduler].append(function)
        return function

    return add


def expect(job: Job, got: object, wanted: object, what: str) -> None:
    """Raises an AssertionError that shows what the run said."""
    assert got == wanted, f"{what}: {got!r}, not {wanted!r}\n{job.log.read_text()[-2500:]}"


# --- Kubernetes ------------------------------------------------------------------------------


def terminated(proof: Proof, ranks: int, workers: int, command: list[str], code: int) -> None:
    """SIGTERM to the first process, over and over; each time it must answer this code."""
    job = proof.job(workers=workers)
    # It must not come to its end before the signal; nor, if it is not to hear it, after that.
    pod = Pod(job, recipe("job.yaml"), command, PACE_SECONDS="1")
    pod.grace_seconds /= 20 if code == 137 else 1
    for round_ in range(1, proof.rounds + 1):
        with pod.started() as container:
            wait_for(lambda n=round_: job.trains(n), "training")
            expect(job, container.zombies(), set(), "zombies")
            expect(job, container.terminate(), code, "code after SIGTERM")
        assert pod.restarts(code)
        reasons = [end["reason"] for end in ledger(job.output, "end")]
        expect(job, reasons, ["SIGTERM"] * round_ * (code != 137), "reasons in the ledger")
    pod = Pod(job, recipe("job.yaml"), command)
    with pod.started() as container:
        expect(job, container.wait(), 0, "code at the end")
    assert not pod.restarts(0)
    proof.compare(job, ranks)
    left = sorted(path.name for path in pod.memory.iterdir() if "paddle" in path.name)
    expect(job, left, [], "left in shared memory")


def python(*words: str) -> list[str]:
    """The command of a container."""
    return ["python", "train.py", "--output", "/runs/line", "--device", "cpu", *words]


def shell(words: list[str]) -> list[str]:
    """The same in a shell, which stays if it has something else to do."""
    return ["sh", "-c", f"cd . && {' '.join(words)}"]


@case("kubernetes")
def the_recipe(proof: Proof) -> None:
    terminated(proof, 2, 0, [], 143)


@case("kubernetes")
def one_process(proof: Proof) -> None:
    terminated(proof, 1, 0, python(), 143)


@case("kubernetes")
def one_process_with_workers(proof: Proof) -> None:
    terminated(proof, 1, 2, python(), 143)


@case("kubernetes")
def two_processes_with_workers(proof: Proof) -> None:
    terminated(proof, 2, 1, python("--nprocs", "2"), 143)


@case("kubernetes")
def a_shell_that_execs(proof: Proof) -> None:
    terminated(proof, 1, 0, shell(["exec", *python()]), 143)


@case("kubernetes")
def a_shell_that_stays_loses_what_was_not_saved(proof: Proof) -> None:
    # It has no handler and passes nothing on: SIGKILL ends all, and the run goes on from its
    # newest checkpoint.
    terminated(proof, 1, 2, shell(python()), 137)


@case("kubernetes")
def paddles_launcher(proof: Proof) -> None:
    words = ["python", "-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
    terminated(proof, 2, 0, [*words, *python()[1:]], 15)


@case("kubernetes")
def sigterm_while_it_starts(proof: Proof, ranks: int = 1) -> None:
    job = proof.job()
    pod = Pod(job, recipe("job.yaml"), python("--nprocs", str(ranks)), SETUP_SECONDS="300")
    with pod.started() as container:
        wait_for((job.directory(0) / "in_setup").exists, "setup_dataloader")
        expect(job, container.terminate(), 143, "code after SIGTERM in setup")
    if ranks == 1:  # else the process that starts them has no record
        expect(job, ledger(job.output, "end")[-1]["exit_code"], 143, "code in the ledger")


@case("kubernetes")
def sigterm_while_two_start(proof: Proof) -> None:
    sigterm_while_it_starts(proof, ranks=2)


@case("kubernetes")
def killed_for_memory(proof: Proof) -> None:
    for ranks, workers in ((1, 2), (2, 1)):
        job = proof.job(workers=workers)
        pod = Pod(job, recipe("job.yaml"), python("--nprocs", str(ranks)))
        for round_ in range(1, proof.rounds + 1):
            with pod.started() as container:
                wait_for(lambda n=round_, job=job: job.trains(n), "training")
                assert pod.restarts(container.kill())
        with pod.started() as container:
            expect(job, container.wait(), 0, "code at the end")
        proof.compare(job, ranks)
        left = sorted(path.name for path in pod.memory.iterdir() if "paddle" in path.name)
        expect(job, left, [], "left in shared memory")


# --- Slurm -----------------------------------------------------------------------------------


def warned(proof: Proof, file: str, nodes: int, *, to_children: bool = False) -> None:
    """The signal before the limit, over and over: saved, requeued, and gone on."""
    job = proof.job(workers=int(to_children), nodes=nodes)  # a loader's workers get it, too
    slurm = Slurm(job, recipe(file), to_children=to_children)
    for round_ in range(1, proof.rounds + 1):
        with slurm.started() as batch:
            wait_for(lambda n=round_: job.trains(n), "training")
            slurm.warn(batch)
            batch.wait(LONG_SECONDS)
        expect(job, slurm.requeued(), True, "requeued")
        reasons = {end["reason"] for end in ledger(job.output, "end")}
        expect(job, reasons <= {"SIGUSR1", "SIGTERM"}, True, f"reasons {reasons}")
        expect(job, len(ledger(job.output, "end")), round_, "ends in the ledger")
    with slurm.started() as batch:
        expect(job, batch.wait(LONG_SECONDS), 0, "code at the end")
    expect(job, slurm.requeued(), False, "requeued after the end")
    proof.compare(job, 2)


@case("slurm")
def usr1_to_the_step(proof: Proof) -> None:
    warned(proof, "one-node.sbatch", 1)


@case("slurm")
def usr1_to_all_processes_of_the_step(proof: Proof) -> None:
    warned(proof, "one-node.sbatch", 1, to_children=True)


@case("slurm")
def usr1_to_the_batch_shell(proof: Proof) -> None:
    warned(proof, "batch-shell.sbatch", 1)


@case("slurm")
def term_to_the_launchers_of_two_nodes(proof: Proof) -> None:
    warned(proof, "several-nodes.sbatch", 2)


@case("slurm")
def term_to_all_processes_of_two_nodes(proof: Proof) -> None:
    warned(proof, "several-nodes.sbatch", 2, to_children=True)


@case("slurm")
def usr1_kills_paddles_launcher_and_its_ranks(proof: Proof) -> None:
    # Which is why the recipe asks for SIGTERM.
    job = proof.job(nodes=2)
    slurm = Slurm(job, recipe("several-nodes.sbatch").replace("TERM@60", "USR1@60"))
    with slurm.started() as batch:
        wait_for(lambda: job.trains(1), "training")
        slurm.warn(batch)
        expect(job, batch.wait(LONG_SECONDS), 138, "code")
    expect(job, ledger(job.output, "end"), [], "ends in the ledger")
    with slurm.started() as batch:
        expect(job, batch.wait(LONG_SECONDS), 0, "code at the end")
    proof.compare(job, 2)


@case("slurm")
def usr1_while_it_starts(proof: Proof) -> None:
    for file in ("one-node.sbatch", "batch-shell.sbatch"):
        job = proof.job()
        slurm = Slurm(job, recipe(file), SETUP_SECONDS="300")
        with slurm.started() as batch:
            wait_for((job.directory(0) / "in_setup").exists, "setup_dataloader")
            slurm.warn(batch)
            batch.wait(LONG_SECONDS)
        expect(job, slurm.requeued(), True, f"{file}: requeued")


@case("slurm")
def the_limit_without_a_warning(proof: Proof) -> None:
    for file, nodes in (("one-node.sbatch", 1), ("several-nodes.sbatch", 2)):
        job = proof.job(nodes=nodes)
        slurm = Slurm(job, recipe(file))
        for round_ in range(1, proof.rounds + 1):
            with slurm.started() as batch:
                wait_for(lambda n=round_, job=job: job.trains(n), "training")
                slurm.reach_limit(batch)
            slurm.requeued()  # or not: the job is over
        with slurm.started() as batch:  # sbatch once more
            expect(job, batch.wait(LONG_SECONDS), 0, "code at the end")
        proof.compare(job, 2)


@case("slurm")
def a_node_that_dies(proof: Proof) -> None:
    job = proof.job(nodes=2)
    slurm = Slurm(job, recipe("several-nodes.sbatch"))
    for round_ in range(1, proof.rounds + 1):
        with slurm.started():
            wait_for(lambda n=round_: job.trains(n), "training")
            # Slurm ends the job and requeues it by itself; everything else is killed on leaving.
            kill(int((job.folder / "tasks").read_text().split()[round_ % 2]), signal.SIGKILL)
            time.sleep(1)
            slurm.abandon()
    with slurm.started() as batch:
        expect(job, batch.wait(LONG_SECONDS), 0, "code at the end")
    proof.compare(job, 2)


@case("slurm")
def a_last_checkpoint_that_takes_long(proof: Proof) -> None:
    # When one rank has ended, paddle's launcher kills the others four seconds later.
    job = proof.job(nodes=2)
    text = recipe("several-nodes.sbatch").replace("runs/line'", "runs/line $MORE'")
    limit = "training.time_limit_seconds=2"
    slurm = Slurm(job, text, WRITE_SECONDS="8", MORE=limit)
    with slurm.started() as batch:
        expect(job, batch.wait(LONG_SECONDS), 124, "code")
    (end,) = ledger(job.output, "end")
    newest = sorted(path.name for path in job.output.glob("checkpoints/step-*"))[-1]
    expect(job, (end["exit_code"], int(newest[5:])), (124, end["iteration"]), "the checkpoint")


@case("slurm")
def another_number_of_nodes_at_each_requeue(proof: Proof) -> None:
    folder, setting = proof.folder / "requeued", "training.max_iteration=300"
    whole = undisturbed(folder, setting)
    job = Job(folder / "changed", 300, nodes=2, script=ELASTIC)
    text = recipe("several-nodes.sbatch").replace("runs/line'", f"runs/line {setting}'")
    for round_, nodes in enumerate((2, 1, 2, 1), 1):
        of_this = text.replace("--nodes=2", f"--nodes={nodes}")
        slurm = Slurm(job, of_this, PACE_SECONDS="0.1" if round_ < 4 else "0")
        with slurm.started() as batch:
            wait_for(lambda n=round_: job.trains(n), "training")
            if round_ < 4:
                slurm.warn(batch)
            batch.wait(LONG_SECONDS)
        expect(job, slurm.requeued(), round_ < 4, "requeued")
    expect(job, [start["ranks"] for start in ledger(job.output, "start")], [2, 1, 2, 1], "ranks")
    expect(job, differences(job.output, whole.output), [], "differences")


def undisturbed(folder: Path, *settings: str) -> Job:
    """A run of elastic.py on one process."""
    job = Job(folder / "whole", 0, script=ELASTIC)
    words = [sys.executable, "train.py", "--output", str(job.output), "--device", "cpu", *settings]
    with job.watched(words).started() as process:
        assert process.wait(LONG_SECONDS) == 0, job.log.read_text()[-2000:]
    return job


# --- etcd ------------------------------------------------------------------------------------


def start_two(etcd: Etcd) -> None:
    """Both launchers."""
    for node in (0, 1):
        etcd.start(node)


def finish(etcd: Etcd) -> None:
    """Waits until all launchers have ended."""
    etcd.wait_for(lambda: all(node.poll() == 0 for node in etcd.nodes), "the end")
    etcd.check_gone()
    if etcd.gave_up:
        print(f"  launchers that gave up and were started again: {etcd.gave_up}", flush=True)


@case("etcd")
def a_rank_that_is_killed(proof: Proof) -> None:
    job = proof.job(nodes=2)
    with Etcd(job, recipe("each-node.sh")) as etcd:
        start_two(etcd)
        for round_ in range(1, proof.rounds + 1):
            etcd.wait_for(lambda n=round_: job.trains(n), "training")
            began = time.monotonic()
            kill(rank_process(etcd, round_ % 2), signal.SIGKILL)
            etcd.wait_for(lambda n=round_: job.trains(n + 1), "training again")
            print(f"  trains again {time.monotonic() - began:.0f} s after the kill", flush=True)
        finish(etcd)
    proof.compare(job, 2)


@case("etcd")
def a_node_that_goes_and_comes_back(proof: Proof) -> None:
    job = proof.job(nodes=2)

    def ranks() -> int:
        """Of the newest start, which trains; 0 if it does not yet."""
        return ledger(job.output, "start")[-1]["ranks"] if job.trains(job.starts) else 0

    with Etcd(job, recipe("each-node.sh"), ("training.max_iteration=100000",)) as etcd:
        start_two(etcd)
        etcd.wait_for(lambda: any(job.output.glob("checkpoints/step-*")), "a checkpoint")
        etcd.nodes[1].kill()
        began = time.monotonic()
        etcd.wait_for(lambda: ranks() == 1, "on one node")
        print(f"  on one node {time.monotonic() - began:.0f} s after the other one's death")
        text = "saved by 2 processes and continued by 1"
        expect(job, job.said(text), True, text)
        for way in ("came back", "came back again"):
            etcd.restart(1)
            began = time.monotonic()
            etcd.wait_for(lambda: ranks() == 2, "on two nodes")
            print(f"  on two nodes {time.monotonic() - began:.0f} s after it {way}", flush=True)
            if way == "came back":  # is taken away
                etcd.nodes[1].terminate()
                expect(job, etcd.nodes[1].wait(LONG_SECONDS), 15, "code of the launcher")
                etcd.wait_for(lambda: ranks() == 1, "on one node again")
        (job.output / "STOP").touch()
        finish(etcd)


@case("etcd")
def a_cluster_that_shrinks_and_grows(proof: Proof) -> None:
    shrinks_and_grows(proof.folder / "elastic", proof.changes, proof.seed)


def shrinks_and_grows(
    folder: Path, count: int, seed: int, between: tuple[float, float] = (0, 4)
) -> tuple[Job, Job, list[Made]]:
    """The run of a cluster that changes, the one of a process that nobody disturbs, the changes.

    Raises:
        AssertionError: They do not end with the same bits.
    """
    # About four a second, and a change itself takes a while.
    draws, iterations = random.Random(seed), int(4 * between[1] + 44) * count
    setting = f"training.max_iteration={iterations}"
    whole = undisturbed(folder, setting)
    job = Job(folder / "changed", iterations, nodes=2, script=ELASTIC)
    plan = planned(count, draws)
    with Etcd(job, recipe("each-node.sh"), (setting,), PACE_SECONDS="0.25") as etcd:
        start_two(etcd)
        changes = Changes(etcd, job.output, draws, between)
        changes.wait_for(2)
        for number, change in enumerate(plan, 1):
            print(f"  {number}. {changes.make(change)}", flush=True)
        (job.output.parent / HURRY).touch()
        etcd.wait_for(job.finished, "the end")
        etcd.check_gone()
    idle = [made.idle_seconds for made in changes.made]
    print(f"  seconds without progress: {min(idle):.1f} to {max(idle):.1f}, {sum(idle):.0f} in all")
    print(f"  processes by start: {[period.processes for period in periods(job.output)]}")
    if etcd.gave_up:
        print(f"  launchers that gave up and were started again: {etcd.gave_up}", flush=True)
    assert not job.said("not exact"), "a start was not exact"
    assert differences(job.output, whole.output) == []
    return job, whole, changes.made


@case("etcd")
def a_stop_that_was_asked_for(proof: Proof) -> None:
    job = proof.job(nodes=2)
    for round_ in range(1, proof.rounds + 1):
        with Etcd(job, recipe("each-node.sh")) as etcd:
            start_two(etcd)
            etcd.wait_for(lambda n=round_: job.trains(n), "training")
            for node in etcd.nodes:
                node.terminate()
            codes = [shown(node.wait(LONG_SECONDS)) for node in etcd.nodes]
            expect(job, codes, [15, 15], "codes of the launchers")
            etcd.check_gone()
        expect(job, job.starts, round_, "starts")
        expect(job, [end["reason"] for end in ledger(job.output, "end")], ["SIGTERM"] * round_, "")
    with Etcd(job, recipe("each-node.sh")) as etcd:
        start_two(etcd)
        finish(etcd)
    proof.compare(job, 2)


@case("etcd")
def codes_that_are_restarted_and_how_often(proof: Proof) -> None:
    # One node: nobody else takes part in the counting. Paddle counts from -1.
    for option, code in (
        ("training.time_limit_seconds=1 training.max_iteration=10000", 124),
        ("data.samples=-1", 78),
    ):
        job = proof.job()
        text = recipe("each-node.sh").replace("--max_restart 100", "--max_restart 2")
        with Etcd(job, text.replace("--nnodes 1:2", "--nnodes 1"), tuple(option.split())) as etcd:
            etcd.start(0)
            expect(job, etcd.nodes[0].wait(LONG_SECONDS), code, "code of the launcher")
            etcd.check_gone()
        ends = [end["exit_code"] for end in ledger(job.output, "end")]
        expect(job, ends, [code] * 4, "codes of the ranks")
    job = proof.job()
    with Etcd(job, recipe("each-node.sh").replace("--nnodes 1:2", "--nnodes 1")) as etcd:
        etcd.start(0)
        etcd.wait_for(lambda: job.trains(1), "training")
        (job.output / "STOP").touch()
        expect(job, etcd.nodes[0].wait(LONG_SECONDS), 0, "code after STOP")
    expect(job, job.starts, 1, "starts after STOP")


def lacks() -> dict[str, str]:
    """What this machine has not got, by scheduler; "" if nothing."""
    os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    etcd = "" if shutil.which("etcd") else "no etcd"
    etcd = etcd or ("" if importlib.util.find_spec("etcd3") else "no module etcd3")
    pods = "" if namespaces() else "no pid namespace may be made"
    return {"etcd": etcd, "slurm": "", "kubernetes": pods}


def tried(proof: Proof, function: Callable[[Proof], None]) -> bool:
    """Whether a case was right; a line for it."""
    began, wrong = time.monotonic(), ""
    try:
        function(proof)
    except (AssertionError, LookupError, TimeoutError, subprocess.TimeoutExpired) as error:
        wrong = "".join(traceback.format_exception(error)[-3:])
    name = function.__name__.replace("_", " ")
    seconds = time.monotonic() - began
    print(f"{name}: {'WRONG ' + wrong if wrong else 'right'}, {seconds:.0f} s", flush=True)
    return not wrong


def main() -> None:
    """Prints how many cases were right; exit code 1 if not all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=CASES, default=[*CASES])
    parser.add_argument("--rounds", type=int, default=2, help="disturbances of each run")
    parser.add_argument("--changes", type=int, default=20, help="of a cluster that changes size")
    parser.add_argument("--seed", type=int, default=0, help="of these changes")
    parser.add_argument("--case", default="", help="a part of the name of the cases")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="clusters-"))
    proof, right, number = Proof(folder, args.rounds), 0, 0
    proof.changes, proof.seed = args.changes, args.seed
    for scheduler, lack in lacks().items():
        if scheduler in args.only and lack:
            print(f"{scheduler}: SKIPPED, {lack}")
        elif scheduler in args.only:
            cases = [f for f in CASES[scheduler] if args.case.replace(" ", "_") in f.__name__]
            of_this = [tried(proof, function) for function in cases]
            print(f"{scheduler}: {sum(of_this)} of {len(of_this)} cases right", flush=True)
            right, number = right + sum(of_this), number + len(of_this)
    if right == number:
        shutil.rmtree(folder)
    else:
        print(f"see {folder}")
    print(f"{right} of {number} cases right")
    sys.exit(right != number or not number)


if __name__ == "__main__":
    main()

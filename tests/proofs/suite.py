"""Proves that the tests pass wherever they are run, however busy the machine is.

The suite is run over and over beside two busy loops: as it is; where no namespaces may be made and
/dev/shm has 64 MB, with the signals ignored that & and nohup ignore; as a user who is not root; and
in one process. A run has passed if pytest says so, and if nothing that it started is left. If this
machine cannot make a setting, a line says why. With --all the long tests are run, too. It takes
hours.

    python tests/proofs/suite.py [--times 10] [--only plain container user single] [--all]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from repository import commit, git

from expbase.base.processes import die_with_parent

ROOT = Path(__file__).parents[2]
USER = "65534"
LONG_SECONDS = 3600.0  # that no run takes
GONE_SECONDS = 60.0  # that what came of one that has ended may still be there
BUSY = [sys.executable, "-S", "-c", "while True: pass"]
# A capability that is not in the bounding set is in no process that comes of this one.
CONTAINER = """
trap '' HUP INT QUIT
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
exec setpriv --pdeathsig=KILL --bounding-set=-sys_admin "$@"
"""
AS_USER = f"""
exec setpriv --pdeathsig=KILL --reuid={USER} --regid={USER} --clear-groups "$@"
"""


def in_namespace(script: str) -> list[str]:
    """The beginning of a command that goes through a shell, whose mounts nobody else sees."""
    return ["unshare", "--mount", "sh", "-ec", script, "sh"]


def python_for_all(folder: Path) -> str:
    """What a shell does so that anybody may use this python, if it lies in somebody's home."""
    base = Path(sys.base_prefix)
    closed = [path for path in reversed(base.parents) if not path.stat().st_mode & 0o001]
    if not closed:
        return ""
    kept = folder / "python"
    kept.mkdir()
    over = ["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(closed[0])]
    bind = ["mount", "--bind"]
    commands = [[*bind, str(base), str(kept)], over, ["mkdir", "-p", str(base)]]
    return "".join(f"{shlex.join(c)}\n" for c in [*commands, [*bind, str(kept), str(base)]])


class Setting:
    """A way to run the suite: `before` pytest's command, `words` of it, where, and as whom."""

    def __init__(self, name: str, folder: Path, words: list[str]) -> None:
        self.name, self.tree = name, ROOT
        self.words = [*words, *(["-p", "no:randomly", "-n", "0"] if name == "single" else [])]
        self.before: list[str] = []
        self.variables: dict[str, str] = {}
        if name == "container":
            self.before = in_namespace(CONTAINER)
        if name == "user":
            self.tree, home = folder / "tree", folder / "home"
            # The installed package is that of this checkout, and tests want the one beside them.
            bind = shlex.join(["mount", "--bind", f"{ROOT}/expbase", f"{self.tree}/expbase"])
            self.before = in_namespace(f"{python_for_all(folder)}{bind}\n{AS_USER}")
            self.variables = {"HOME": str(home), "TMPDIR": str(home)}
            self._copy(home)

    def _copy(self, home: Path) -> None:
        """Makes what the user owns: a home, and a copy of the checkout."""
        home.mkdir()
        command = ["git", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard"]
        names = subprocess.run(command, capture_output=True, check=True).stdout.split(b"\0")
        for name in filter(None, map(os.fsdecode, names)):
            if os.path.lexists(ROOT / name):
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name, follow_symlinks=False)
        git(self.tree, "init", "--quiet")
        commit(self.tree, "a copy")
        for path in (home, self.tree, *self.tree.rglob("*")):
            os.chown(path, int(USER), int(USER), follow_symlinks=False)

    @contextlib.contextmanager
    def started(self, words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Python with these words; nothing is left of it afterwards."""
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*self.before, sys.executable, *words],
                cwd=self.tree,
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                preexec_fn=die_with_parent,
                start_new_session=True,
            )
        others = {*psutil.Process().children()} - {psutil.Process(process.pid)}
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for _ in range(3):  # one may have started another one meanwhile
                left = descendants(others)
                for one in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                psutil.wait_procs(left, GONE_SECONDS)

    def missing(self, folder: Path) -> str:
        """Why this machine cannot make it; empty if it can."""
        if self.before and os.geteuid():
            return "it needs root"
        log = folder / "missing.txt"
        try:
            with self.started(["-W", "ignore", "-c", "from expbase import main"], log) as process:
                code = process.wait(LONG_SECONDS)
        except FileNotFoundError as error:
            return str(error)
        return (log.read_text() or f"code {code}").splitlines()[-1] if code else ""

    def run(self, log: Path) -> list[str]:
        """Runs the suite; what was wrong."""
        others = {*psutil.Process().children()}
        with self.started(["-m", "pytest", "-rfE", *self.words], log) as process:
            try:
                code = process.wait(LONG_SECONDS)
            except subprocess.TimeoutExpired:
                return [f"it took more than {LONG_SECONDS:.0f} s"]
            _, left = psutil.wait_procs(descendants(others), GONE_SECONDS)
            wrong = [f"{' '.join(words_of(one))} is left" for one in left]
        text = log.read_text(errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", text, re.MULTILINE)
        return wrong + (failed or [f"ended with code {code}"]) * (code != 0)


def descendants(others: set[psutil.Process]) -> list[psutil.Process]:
    """All that came of this process, orphans too, without what came of `others`."""
    found = [one for one in psutil.Process().children() if one not in others]
    for one in [*found]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += one.children(recursive=True)
    return found


def words_of(process: psutil.Process) -> list[str]:
    """Its command."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return [str(process)]


@contextlib.contextmanager
def two_loops() -> Iterator[None]:
    """The machine is busy in the block."""
    # Each in a session of its own: to the scheduler they are not a part of what they are beside.
    options = {"preexec_fn": die_with_parent, "start_new_session": True}
    loops = [subprocess.Popen(BUSY, **options) for _ in range(2)]  # type: ignore[call-overload]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def prove(name: str, times: int, folder: Path, words: list[str]) -> tuple[int, int]:
    """Runs the suite so many times; how often, and how often it passed."""
    folder.mkdir()
    folder.chmod(0o755)
    setting = Setting(name, folder, words)
    if reason := setting.missing(folder):
        print(f"{name}: not done: {reason}", flush=True)
        return 0, 0
    passed = 0
    for number in range(1, times + 1):
        log = folder / f"{number}.txt"
        wrong = setting.run(log)
        passed += not wrong
        for text in wrong:
            print(f"    {name} {number}: {text} ({log})", flush=True)
    print(f"{name}: {passed} of {times} passed", flush=True)
    return times, passed


def main() -> None:
    """Prints how many runs passed in each setting; exit code 1 if one did not."""
    parser = argparse.ArgumentParser()
    settings = ("plain", "container", "user", "single")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=settings, default=settings)
    parser.add_argument("--all", action="store_true", help="the long tests, too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)
    folder = Path(tempfile.mkdtemp(prefix="suite-"))
    folder.chmod(0o755)
    with two_loops():
        words = ["-m", ""] if args.all else []
        counts = [prove(name, args.times, folder / name, words) for name in args.only]
    done, passed = map(sum, zip(*counts, strict=True))
    if done == passed:
        shutil.rmtree(folder)
    print(f"{passed} of {done} runs passed; {counts.count((0, 0))} settings not done")
    sys.exit(passed != done or not done)


if __name__ == "__main__":
    main()

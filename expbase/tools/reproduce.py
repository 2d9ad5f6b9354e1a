"""Makes a run again from its records, in parts, and tells whether the bits are the same.

A part begins at a checkpoint that is kept, or where the run began, and ends at a later one. By
default all parts are made; --from and --to make one, --parts some of them at random. Each is
trained by the run's command in another output, with the variables that the run has noted. Compared
are all checkpoints that are kept on the way, each file of them, and every number logged but times
and speeds. Words after -- are added to the command, as in -- --nprocs 1 with training.shares.

Give it in the git repository of the run's code, or in a clone. The code is that of the run's commit
with its changes, in a work tree of its own; what git does not know is linked or copied into it.
Without git the files of the working directory are taken, if they are the run's. With --here the
code and the packages of now are taken; what they log in addition is shown.

With --digest, the one that the run has printed at its end, the files must be those that it binds:
each part begins and ends at a checkpoint that is bound, and the digest draws --parts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from expbase.cli import count, report_user_errors
from expbase.config import CONFIG, ConfigError
from expbase.engine import run_digest
from expbase.tools import add_tool, reproduce_receipts
from expbase.tools.child_processes import ended_by_signals
from expbase.tools.recorded_commands import Commands
from expbase.tools.remake_part import Made, make
from expbase.tools.run_parts import History, Stretch, history_of
from expbase.tools.runs import printable

_UNTESTED = 125  # `git bisect run` skips a commit that answers so
_SHOWN = 40  # numbers that the code of now has logged, and the run had not


def add_parser(tools: Any) -> None:
    codes = (
        "0 the same, 1 not, or an error, 125 by --here if the script has failed before its first "
        "update, so that `git bisect run` skips the commit, 130 Ctrl-C, 143 SIGTERM"
    )
    add = add_tool(tools, main, codes, "RUN [options] [-- WORDS]").add_argument
    add("run_dir", type=Path, metavar="RUN", help="the output directory of a run")
    add("--from", dest="first", type=_from_zero, metavar="N", help="one part: its first state")
    add("--to", dest="last", type=count, metavar="N", help="one part: its last iteration")
    add("--parts", type=count, metavar="K", help="K parts at random")
    add("--seed", type=_from_zero, metavar="N", help="which ones (default: another one each time)")
    add("--digest", metavar="D", help="first check that the files are those of this digest; with "
        "--parts it draws them: the same ones for everybody")  # fmt: skip
    add("--jobs", type=count, default=1, metavar="N", help="make N parts at once (default: 1)")
    add("--here", action="store_true", help="with the code and the packages of now")
    add("--updates", action="store_true", help="print what each update has logged, and its samples")
    add("--python", default=sys.executable, metavar="FILE", help="the interpreter")
    add("--record", type=Path, metavar="FILE", help="write a receipt, as JSON")
    add(
        "--receipts", nargs="+", type=Path, metavar="FILE", help="only say what these show together"
    )


def _from_zero(text: str) -> int:
    return count(text, least=0)


def main(args: argparse.Namespace) -> int:
    with report_user_errors("python -m expbase reproduce"):
        history = history_of(args.run_dir)
        if args.digest:
            history, problem = _of_digest(history, args)
            if problem:
                print(printable(f"NOT REPRODUCED: {problem}"))
                return 1
        if args.receipts:
            problem, result = reproduce_receipts.together(history, args.receipts)
            print(result)
            return int(bool(problem))
        parts = _chosen(history, args)
        with ended_by_signals(), tempfile.TemporaryDirectory(prefix="expbase-reproduce-") as folder:
            made = _make_all(history, parts, args, Path(folder))
    result = _result(history, made, args)
    if args.record:
        reproduce_receipts.write(args.record, history, made, result, args.digest)
    print(result)
    bad = [one for one in made if one.problem]
    is_untested = args.here and bad and all(one.has_failed for one in bad)
    return _UNTESTED if is_untested else int(bool(bad))


def _of_digest(history: History, args: argparse.Namespace) -> tuple[History, str]:
    """Returns a history with the checkpoints that a digest binds, and why the run is not of it.

    Of the others an author could add and remove some, until the parts that are drawn are easy ones.

    Raises:
        ConfigError: The text is no digest, or a seed is given beside it.
        ValueError: The run has no digest.
    """
    run_digest.check_form(args.digest)
    if args.seed is not None:
        raise ConfigError("--seed: given with --digest, which draws the parts.")
    problems = run_digest.problems(history.run, args.digest)
    if problems:
        more = f" (one of {len(problems)}; `show RUN --digest` names all)" * (len(problems) > 1)
        return history, f"not the files of digest {args.digest}: {problems[0]}{more}"
    written = run_digest.read(history.run)
    return replace(history, kept=[one for one in history.kept if written.binds(one)]), ""


def _chosen(history: History, args: argparse.Namespace) -> list[Stretch]:
    """Returns the parts that are to be made, in order."""
    if args.seed is not None and not args.parts:
        raise ConfigError("--seed: given without --parts, whose choice it decides.")
    if args.first is not None or args.last is not None:
        if args.parts:
            raise ConfigError("--parts: given with --from or --to, which are one part.")
        return [history.part(args.first, args.last)]
    parts = history.parts()
    if not args.parts or args.parts >= len(parts):
        return parts
    if args.seed is None and not args.digest:
        args.seed = random.SystemRandom().randrange(10**6)
    return sorted(random.Random(args.digest or args.seed).sample(parts, args.parts))


def _make_all(
    history: History, parts: list[Stretch], args: argparse.Namespace, folder: Path
) -> list[Made]:
    """Makes parts again, some at once, and says what each has shown."""
    config = history.run / CONFIG
    if not config.is_file() and any(part.first in history.kept for part in parts):
        raise ConfigError(
            f"{config}: no such file; expected that of the run, with which a part goes on from a "
            "checkpoint. Put it back."
        )
    made: list[Made] = []
    commands = Commands(history.run, args, has_company=min(args.jobs, len(parts)) > 1)

    commands.check(leg for part in parts for leg in history.legs(part))

    def begin(part: Stretch) -> Made:
        return make(history, part, commands, folder / str(part.first))

    with ThreadPoolExecutor(args.jobs) as executor:
        try:
            for one in executor.map(begin, parts):
                made.append(one)
                _show(one, is_one_of_several=len(parts) > 1)
        finally:
            commands.end()
            executor.shutdown(cancel_futures=True)
    return made


def _show(made: Made, *, is_one_of_several: bool) -> None:
    """Prints what a part has shown."""
    for line in made.updates:
        print(line)
    for name, number in [*made.new.items()][-_SHOWN:]:
        print(f"new: {name}: {number}")
    if len(made.new) > _SHOWN:
        print(f"new: {len(made.new)} numbers in all, which --record writes")
    if is_one_of_several:
        print(f"{made.part}: {made.problem or f'the same bits ({_sizes([made])})'}", flush=True)


def _result(history: History, made: list[Made], args: argparse.Namespace) -> str:
    """Returns the last line: whether all is the same, and what was compared."""
    yes, no = "reproduced", "NOT REPRODUCED"
    if args.here:
        yes, no = "the same by the code of now", "NOT THE SAME BY THE CODE OF NOW"
    bad = [one for one in made if one.problem]
    if bad:
        result = f"{no}: {bad[0].part}: {bad[0].problem.removesuffix('.')}"
        result += f" ({len(bad)} of {len(made)} parts are not the same)" * (len(made) > 1)
    else:
        what = _what([one.part for one in made], history)
        result = f"{yes}: {what}, the same bits ({_sizes(made)})"
    if args.seed is not None:
        result += f"; --parts {args.parts} --seed {args.seed} takes these"
    if args.digest:
        takes = f", and --parts {args.parts} takes these" * bool(args.parts)
        result += f"; the files are those of digest {args.digest}{takes}"
    for option, digest in made[0].then.facts.get("began_from", {}).items():
        result += f". It began from {option}, {digest}"
    changed = {key: pair for one in (bad or made) for key, pair in one.changed.items()}
    if bad:  # what is likely then stands first
        changed = dict(sorted(changed.items(), key=lambda one: not one[0].startswith("processor.")))
    if changed:
        words = ", ".join(f"{key}: {before} → {after}" for key, (before, after) in changed.items())
        result += f". Not as it was: {textwrap.shorten(words, 600)}"
    return result


def _what(parts: list[Stretch], history: History) -> str:
    """Returns which iterations some parts are, in words."""
    all_parts = history.parts() if history.kept else []
    if parts == all_parts:
        whole = Stretch(parts[0].first, parts[-1].last)
        return str(whole) + f" in {len(parts)} parts" * (len(parts) > 1)
    end = max([*history.kept, parts[-1].last])
    return f"{', '.join(map(str, parts))} of {end}"


def _sizes(made: list[Made]) -> str:
    saved = [name for one in made for name in one.then.saved]
    numbers = len({name for one in made for name in one.then.numbers})
    named = saved[0] if len(saved) == 1 else f"{len(saved) or 'no'} checkpoints"
    return f"{named}, {numbers} logged numbers"

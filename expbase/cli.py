"""The command line of an experiment: `main(Experiment)` is a whole script body.

Options beat the config file, the file beats the defaults. Nothing here trains or opens files but
the config; `python train.py --help` lists the options. Starting a process per rank is
left to paddle (`paddle.distributed.launch`, or its `spawn` for `--nprocs`).

    if __name__ == "__main__":
        main(Experiment)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expbase import distributed
from expbase.config import Config, ConfigError, check_training, dump_yaml, fill, flatten
from expbase.experiment import ExperimentBase
from expbase.launch import spawn
from expbase.meter import json_value
from expbase.run_dir import CONFIG
from expbase.smoke import smoke
from expbase.state.checkpoint import CheckpointError, name_of
from expbase.state.weights import WeightsError


class Paragraphs(argparse.HelpFormatter):
    """Fits each paragraph of a text to the terminal; what is indented stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        fill = super()._fill_text
        return "\n\n".join(
            part if re.search("^ ", part, re.MULTILINE) else fill(part, width, indent)
            for part in parts
        )


def default_argument_parser() -> argparse.ArgumentParser:
    """The parser with the options that every experiment has; add your own to it."""
    parser = argparse.ArgumentParser(
        formatter_class=Paragraphs,
        epilog="The same command continues a run that was ended by anything at all.\n\n"
        "exit codes: 0 finished, 1 error, 2 unknown option, 124 time limit, 130 Ctrl-C, "
        "143 SIGTERM or SIGUSR1",
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file that changes default values")
    add("--data", metavar="PATH", help="the data, for the experiment's own use (self.args.data)")
    add(
        "--output",
        metavar="DIR",
        help="directory of the run; {key} is replaced by a config value: runs/lr{optim.lr}",
    )
    add(
        "--checkpoint_path",
        metavar="DIR",
        help="a checkpoint of another run to continue from, with its whole state",
    )
    add("--init_model_path", metavar="PATH", help="weights to start from, weights only")
    add("--init_partial", action="store_true", help="take of them what fits")
    add(
        "--device",
        metavar="NAME",
        help="cpu, gpu, gpu:0, xpu … (default: gpu if there is one, else cpu)",
    )
    add("--nprocs", type=count, default=1, metavar="N", help="processes on this machine")
    add("--fresh", action="store_true", help="move what is in the output directory aside first")
    add("--force", action="store_true", help="go on although the config differs from the run's")
    add("--print_config", action="store_true", help="print the resolved config and end")
    add(
        "--smoke",
        action="store_true",
        help="try it before a long run: two updates, a save, a load, two batches of validation, in "
        "a temporary directory",
    )
    look = parser.add_argument_group(
        "looking at a run", "It may be running. Its own config holds, but for --config and --opts."
    ).add_mutually_exclusive_group()
    look.add_argument(
        "--evaluate",
        metavar="CHECKPOINT",
        help="validate best, last or an iteration on self.test_loader, else self.valid_loader",
    )
    look.add_argument(
        "--export",
        metavar="CHECKPOINT",
        help="write self.model of best, last or an iteration for inference, into DIR/export",
    )
    add(
        "--opts",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="config values: optim.lr 0.1 training.seed 3 (or KEY=VALUE)",
    )
    add("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="config values")
    return parser


def main(
    experiment: type[ExperimentBase],
    *,
    parser: argparse.ArgumentParser | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Runs an experiment class from the command line.

    Args:
        experiment: The class; its `default_config()` gives the defaults.
        parser: `default_argument_parser()`, or it with options added.
        argv: The words after the program's name; those of this process by default.

    Raises:
        SystemExit: With the code that DESIGN gives the end of the run, unless that is 0.
    """
    parser = parser or default_argument_parser()
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_config(experiment, args)
        if args.print_config:
            print(dump_yaml(config), end="")
            return
        if not args.output and not args.smoke:
            raise ConfigError("--output: not given; expected the directory of the run.")
        args.output = fill_in(args.output or "", config)
        if args.evaluate is not None or args.export is not None:
            for option in ("fresh", "force", "checkpoint_path", "init_model_path", "smoke"):
                if getattr(args, option):
                    raise ConfigError(
                        f"--{option}: given with --evaluate or --export, which only look at a run."
                    )
            for option in ("evaluate", "export"):
                which = getattr(args, option)
                if which is not None and not re.fullmatch("best|last|[0-9]+", which):
                    raise ConfigError(
                        f"--{option}: {which!r} given; expected best, last or an iteration."
                    )
            config = load_config(experiment, args, Path(args.output) / CONFIG)
    except ConfigError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    if args.nprocs > 1 and distributed.world_size() == 1:
        words = (experiment, config, args, parser.prog)
        if code := spawn(_run, words, args.nprocs, args.device):
            sys.exit(code)
    else:
        _run(experiment, config, args, parser.prog)


def load_config(
    experiment: type[ExperimentBase], args: argparse.Namespace, of_run: Path | None = None
) -> Config:
    """The defaults of the class, changed by the file and the options of the command line.

    Args:
        experiment: The class.
        args: Parsed.
        of_run: The config file of a run, which changes the defaults first, if it is there.

    Raises:
        ConfigError: One of them does not fit.
    """
    config = fill(experiment.default_config())
    if of_run is not None and of_run.is_file():
        config.merge_from_file(str(of_run))
    if args.config:
        config.merge_from_file(args.config)
    for words in (args.opts, args.overrides):
        config.merge_from_list(words)
    check_training(config.training)
    return config


def fill_in(output: str, config: Mapping[str, Any]) -> str:
    """The output path with config values in place of their `{full.key}`s.

    Raises:
        ConfigError: There is no such key.
    """
    values = flatten(config)

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ConfigError(
                f"--output: {match[0]} names no config value; expected one of {', '.join(values)}."
            )
        return str(values[match[1]]).replace("/", "_")

    return str(Path(re.sub(r"\{([^{}]*)\}", value, output)))


def _run(
    experiment: type[ExperimentBase], config: Config, args: argparse.Namespace, prog: str
) -> None:
    with plainly(prog):
        _train_or_look(experiment, config, args)


@contextlib.contextmanager
def plainly(prog: str) -> Iterator[None]:
    """Has a person's slip end in a line, on one rank; the log has the traceback."""
    try:
        yield
    except (ConfigError, CheckpointError, WeightsError) as error:
        sys.exit(f"{prog}: error: {error}" if distributed.rank() == 0 else 1)
    except distributed.RankZeroError:
        sys.exit(1)  # it has said it


def _train_or_look(
    experiment: type[ExperimentBase], config: Config, args: argparse.Namespace
) -> None:
    if args.smoke:
        return smoke(experiment, config, args)
    exp = experiment(config, args)
    exp.setup()
    if args.evaluate is not None or args.export is not None:
        with exp.closing():
            _look(exp, args)
    else:
        exp.run()


def _look(exp: ExperimentBase, args: argparse.Namespace) -> None:
    exp.load_checkpoint(args.export if args.evaluate is None else args.evaluate)
    found: dict[str, Any] = {"iteration": exp.iteration, "epoch": exp.epoch}
    if args.evaluate is not None:
        loader = "valid_loader" if exp.test_loader is None else "test_loader"
        results = exp.evaluate(exp.test_loader)
        found = {n: json_value(value) for n, value in results.items()} | found | {"loader": loader}
    else:
        path = Path(args.output) / "export" / name_of(exp.iteration) / "model"
        exp.export(path)
        found |= {"exported": str(path)}
    if exp.rank == 0:
        print(json.dumps(found))


def count(text: str) -> int:
    """The number in a word of the command line, for argparse: 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given; expected 1 or more")
    return int(text)

"""The command line of an experiment: `main(Experiment)` is a whole script body.

Options beat the config file, the file beats the defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from expbase.base import import_paddle  # noqa: F401  # first: of a process that was spawned, too
from expbase.base.did_you_mean import did_you_mean
from expbase.base.error_text import sentence
from expbase.base.errors import add_note, is_on_purpose
from expbase.base.exit_codes import ExitCode, exit_code_of
from expbase.base.processes import ended_by_sigterm
from expbase.base.terminal import say, show, show_any_character
from expbase.checkpoint.layout import CheckpointError
from expbase.checkpoint.model_files import WeightsError
from expbase.config import (
    CONFIG,
    Config,
    ConfigError,
    adopt,
    defaults_of,
    dump_yaml,
    flatten,
    load_yaml,
)
from expbase.engine.start import Options, check_platform, output_of
from expbase.experiment import E, ExperimentBase
from expbase.help_text import Paragraphs, Parser, add_version
from expbase.mixins_in_front import in_front, put_in_front, set_in_front, with_mixins
from expbase.ranks import collectives
from expbase.record import provenance
from expbase.smoke import Smoke
from expbase.training import check_training, resolved

# The groups of --help. An option without a metavar has no value.
_RUN, _BEGIN, _PLACE, _LOOK = "the run", "where it begins", "where it runs", "looking at it"
_BEGINNINGS = {
    "--checkpoint_path": ("DIR", "another run, RUN or RUN/best, to continue with its whole state"),
    "--init_model_path": ("PATH", "weights to start from: a file, RUN (its newest ones), RUN/best"),
    "--init_partial": ("", "take from --init_model_path only the weights that fit"),
    "--fresh": ("", "move what is in the output directory aside first"),
    "--force": ("", "go on although the config differs from the run's"),
}
_NO_OPTION = " --help names the options; a value of your own is a key of default_config: KEY=VALUE."
_INSPECTIONS = {
    "--evaluate": "validate best, last or an iteration on self.test_loader, else self.valid_loader",
    "--export": "write self.model of best, last or an iteration for inference, into DIR/export",
}


class _Files(argparse.Action):
    """Notes a file as the text that was given, as everybody's `--config` does; several as a list.

    So `merge_from_file(args.config)` loses none of several: yacs' refuses a list, ours takes it.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        before = _listed(vars(namespace)[self.dest])
        setattr(namespace, self.dest, [*before, values] if before else values)


def _listed(files: str | Sequence[str] | None) -> list[str]:
    return [files] if isinstance(files, str) else list(files or [])


class _Processes(argparse.Action):
    """Notes a number of processes: --ngpu is PaddleSpeech's word, whose experiments read it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        if values == 0:
            namespace.device, namespace.ngpu = "cpu", 0
            return
        namespace.nprocs = 0 if values == "auto" else values
        if namespace.ngpu:  # not on the CPU
            namespace.ngpu = namespace.nprocs or 1


class _Parser(Parser):
    """Names what a notebook's kernel was given by nobody."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized") and _is_in_notebook():
            message += (
                ". In a notebook sys.argv is the kernel's; expected parse_args(['--output', …])"
            )
        super().error(message)


class _Given(argparse.Namespace):
    """The options as given; it knows whether somebody has read `data`, which was not."""

    __slots__ = ("_missed_data",)  # beside the options: vars() has these alone

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "data" and value is None:
            self._missed_data = True
        return value

    def explain(self, error: Exception) -> None:
        """Makes an error that may come of it say so: `Path(None)`, or "None/train" not found."""
        if hasattr(self, "_missed_data") and re.search(r"NoneType|['\"]None\b", str(error)):
            add_note(
                error,
                "--data was not given, so self.args.data, which this experiment has read, is None; "
                "expected --data PATH if it needs some.",
            )


def default_argument_parser() -> argparse.ArgumentParser:
    """Makes a parser with the options that every experiment has.

    Returns:
        The parser; add your own options to it.
    """
    parser = _Parser(
        allow_abbrev=False,  # `--smok` is a mistake, and no trial
        add_help=False,  # its group would come first
        formatter_class=Paragraphs,
        conflict_handler="resolve",  # main adds its options again if it is called again
        epilog="The same command continues a run that was ended by anything at all.\n\n"
        "exit codes: 0 finished, 1 error, 78 a mistake in what was given, 124 time limit, "
        "129 SIGHUP, 130 Ctrl-C, 143 SIGTERM, SIGUSR1, SIGUSR2 or SIGXCPU",
    )
    add = _group(parser, _RUN).add_argument
    add("--output", type=_path, metavar="DIR",
        help="the run's directory; {key} is replaced by a config value: runs/lr{optim.lr} "
        "(default: runs/ and the name of the class)")  # fmt: skip
    add("--config", action=_Files, type=_path, metavar="FILE",
        help="YAML file that changes default values; among several a later one wins")  # fmt: skip
    more: dict[str, Any] = {"action": "extend", "default": None}
    add("opts", nargs="*", metavar="KEY=VALUE", help="config values: training.max_epoch=5", **more)
    add("--opts", nargs="+", metavar="KEY VALUE", help="the same", **more)
    add(
        "--data",
        type=_path,
        metavar="PATH",
        help="the data, for the experiment's own use (self.args.data)",
    )
    add("--no_advice", dest="advice", action="store_false",
        help="train without the doctor, who only looks and says what may be a mistake")  # fmt: skip
    add = _group(parser, _BEGIN).add_argument
    for option, (metavar, text) in _BEGINNINGS.items():
        if metavar:
            add(option, type=_path, metavar=metavar, help=text)
        else:
            add(option, action="store_true", help=text)
    add = _group(parser, _PLACE).add_argument
    add("--device", metavar="NAME",
        help="cpu, gpu, gpu:0, xpu, npu … (default: the one paddle takes)")  # fmt: skip
    for name, least, text in (
        ("--nprocs", 1, "processes on this machine; auto: as training.shares allows"),
        ("--ngpu", 0, "PaddleSpeech's name for --nprocs; 0: on the CPU (self.args.ngpu)"),
    ):
        add(name, action=_Processes, default=1, metavar="N", help=text,
            type=functools.partial(_auto_or_count, least=least))  # fmt: skip
    look = _group(parser, _LOOK)
    one_of = look.add_mutually_exclusive_group()
    for option, text in _INSPECTIONS.items():
        one_of.add_argument(option, metavar="CHECKPOINT", help=text)
    look.description = (
        "The run may still be training. Its own config is used, with your --config and KEY=VALUE."
    )
    look.add_argument("-h", "--help", action="help", help="show this help message and end")
    add_version(look)
    return parser


def add_options_of_main(parser: argparse.ArgumentParser) -> None:
    """Adds the options about which a script that does not call main would do nothing."""
    run = _group(parser, _RUN)
    run.description = "All keys of the config, with their values: --print_config."
    run.add_argument("--print_config", action="store_true",
        help="print the whole config and end")  # fmt: skip
    run.add_argument("--smoke", action="store_true",
        help="try it before a long run: two updates (more until a parameter changes), two "
        "batches of validation, a save, a load, an export if there is an input_spec")  # fmt: skip
    _group(parser, _PLACE).add_argument(
        "--restarts", type=lambda text: count(text, least=0), default=0, metavar="N",
        help="start again after a failure, up to N times without a newer checkpoint")  # fmt: skip


def _group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Returns the group of a title, which `parents=[default_argument_parser()]` keeps, too."""
    groups = (group for group in parser._action_groups if group.title == title)
    return next(groups, None) or parser.add_argument_group(title)


def main(
    experiment: type[E],
    *,
    parser: argparse.ArgumentParser | None = None,
    argv: Sequence[str] | None = None,
) -> E | Any:
    """Runs an experiment class from the command line.

    Args:
        experiment: The class; its `default_config()` returns the defaults.
        parser: `default_argument_parser()`, or it with options added.
        argv: The words after the program's name, by default this process's; a notebook has none.

    Returns:
        The experiment, closed; with --nprocs, --restarts or --print_config None, hence `Any`.

    Raises:
        SystemExit: With the exit code of the run, as --help lists them, unless that is 0.
    """
    show_any_character()
    parser = parser or default_argument_parser()
    add_options_of_main(parser)
    with report_user_errors(parser.prog):
        if argv is None and _is_in_notebook():
            raise ConfigError(
                "main: called in a notebook, where sys.argv is the kernel's; expected "
                f"main({experiment.__name__}, argv=['--output', 'runs/NAME'])."
            )
        if isinstance(argv, str):
            raise ConfigError(
                f"main: argv={argv!r} given; expected a list of words: argv={shlex.split(argv)}."
            )
        words = list(sys.argv[1:] if argv is None else argv)
        args = _Given(**vars(_parse(parser, words, experiment)))
        config = load_config(experiment, args)
        if args.print_config:
            show(dump_yaml(resolved(config)), end="")
            return None
        check_options(args)
        is_of_notebook = experiment.__module__ == "__main__" and _is_in_notebook()
        if is_of_notebook and (args.nprocs != 1 or args.restarts):
            raise ConfigError(
                "--nprocs, --restarts: new processes cannot import a class of a notebook; expected "
                f"it in a file: %%writefile train.py, and from train import {experiment.__name__}."
            )
        args.nprocs = args.nprocs or -config.training.shares  # negative: at most so many
        if not args.nprocs:
            raise ConfigError("--nprocs: auto given; expected a number, or training.shares, too.")
        args.output = output_of(experiment, args.output, config)
        if Options.of(args).inspected is not None:
            config = load_config(experiment, args, Path(args.output) / CONFIG)
    with contextlib.ExitStack() as stack:
        if args.smoke:
            stack.enter_context(put_in_front(Smoke))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="expbase-smoke-"))
            args.output = str(Path(folder, "run"))
        return _start(parser.prog, experiment, config, args)


def _is_in_notebook() -> bool:
    """Returns whether the process is a kernel: ipykernel's, or Colab's."""
    return "".join(sys.argv[:1]).endswith("kernel_launcher.py")


def _parse(
    parser: argparse.ArgumentParser, words: list[str], experiment: type[ExperimentBase]
) -> argparse.Namespace:
    """Returns the options; raises a ConfigError that names what is most like an unknown one."""
    args, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        option = unknown[0]
        name, equals, value = option.replace("-", "_").strip("_").partition("=")
        if not equals and option in words:
            value = "".join(words[words.index(option) + 1 :][:1])
        meant = {one: f"--{one}" for one in vars(args)}
        for end in "\n", ".", "_":  # `--training.max_epoch`, `--max_epoch`, `--epoch`
            for key in flatten(defaults_of(experiment)):
                meant.setdefault(key.rpartition(end)[2], f"{key}={value}")
        hint = did_you_mean(name, meant, otherwise=_NO_OPTION, shown=meant.__getitem__)
        raise ConfigError(f"unrecognized arguments: {' '.join(unknown)}.{hint}")
    return args


def check_options(args: argparse.Namespace) -> None:
    """Raises a ConfigError if an option cannot be done here."""
    if args.restarts and collectives.world_size() > 1:
        raise ConfigError(
            "--restarts: given to a process of paddle's launcher; expected the launcher's own "
            "--max_restart, which needs etcd: docs/clusters.md."
        )
    for name in ("checkpoint_path", "init_model_path"):
        if vars(args).get(name) == "":  # it would train from nothing
            raise ConfigError(
                f"--{name}: '' given; expected a path, or no --{name}. Perhaps a variable of the "
                "shell is not set."
            )


def _without_effect(args: argparse.Namespace) -> Iterator[str]:
    """Yields which options have no effect."""
    given = vars(args)
    for name in ("config", "data", "device"):
        if given.get(name) == "" or (name == "config" and "" in _listed(given[name])):
            yield f"--{name}: '' given, which has no effect. Is a variable of the shell not set?"
    if given.get("init_partial") and not given.get("init_model_path"):
        yield "--init_partial: has no effect without --init_model_path."


def load_config(
    experiment: type[ExperimentBase], args: argparse.Namespace, of_run: Path | None = None
) -> Config:
    """Returns the defaults of the class, changed by the files and options of the command line.

    The config file of a run changes them first, if it is there. A line names its keys that the
    class has no more.

    Raises:
        ConfigError: A file or an option does not fit.
    """
    config = defaults_of(with_mixins(experiment))  # as `reproduce` adds what has left
    if of_run is not None and of_run.is_file():
        adopt_aloud(config, load_yaml(of_run), of_run)
        config.merge_from_file(of_run)
    config.merge_from_file([file for file in _listed(args.config) if file])
    config.merge_from_list(args.opts or [])
    check_training(config.training)
    return config


def adopt_aloud(config: Config, of_run: Mapping[str, Any], source: object) -> None:
    """Gives a config the keys of a run that the code has no more, and says which."""
    gone = ", ".join(f"{key}={value!r:.80}" for key, value in adopt(config, of_run).items())
    if gone and collectives.rank() == 0:
        say(f"{source}: default_config has no such keys any more; the run's values hold: {gone}")


def _start(*words: Any) -> Any:
    """Calls `_run` here, in new processes, or in some that are supervised."""
    args = words[-1]
    is_supervised = args.restarts and not in_front()  # a tool wants to see the failure
    if not is_supervised and (args.nprocs == 1 or collectives.world_size() > 1):
        return _run(*words)
    with report_user_errors(words[0]), provenance.held(words[1]):
        if is_supervised:
            from expbase.engine import restarts  # here: few runs need it

            code = restarts.run(_run, words)
        else:
            code = spawn(_run, words, args.nprocs, args.device)
    return sys.exit(code) if code else None


def _run(
    prog: str, experiment: type[ExperimentBase], config: Config, args: _Given
) -> ExperimentBase:
    with report_user_errors(prog):
        try:
            with _answering_mistakes():
                exp = experiment(config, args)
                for text in _without_effect(args) if exp.rank == 0 else ():
                    exp.logger.warning("%s", text)
                exp.setup()
            exp.run()
        except Exception as error:
            args.explain(error)
            raise
        return exp


@contextlib.contextmanager
def _answering_mistakes() -> Iterator[None]:
    """Makes a process that ends by a mistake in the experiment answer ExitCode.MISTAKE."""
    try:
        yield
    except Exception as error:
        vars(error)["exit_code"] = exit_code_of(error, in_setup=True)
        raise


def _show_and_answer(prog: str) -> None:
    """Makes an exception that nobody catches, nor a debugger, be shown as a user wants to see it.

    What was raised on purpose is a sentence, without a traceback; and its exit code is answered.
    """
    show = sys.excepthook

    def show_and_exit(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if is_on_purpose(error):
            say(sentence(prog, error))
        else:
            show(kind, error, trace)
        if exit_code_of(error) == ExitCode.MISTAKE and not hasattr(sys, "ps1"):  # at a prompt
            sys.exit(ExitCode.MISTAKE)

    sys.excepthook = show_and_exit


class MistakeExit(SystemExit):
    """The end of a process that has said in one line what is to be done."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(code)
        self.text = text

    def __str__(self) -> str:
        return self.text


@contextlib.contextmanager
def report_user_errors(prog: str) -> Iterator[None]:
    """Makes a user's mistake end the process with one line that begins with the program's name.

    What else expbase raises on purpose goes on, and is shown so if nobody catches it. SIGTERM ends
    the process, too, until a run has begun, which saves first.
    """
    try:
        check_platform()
        with ended_by_sigterm():
            yield
    except (ConfigError, CheckpointError, WeightsError) as error:
        text = f"{prog}: error: {error}"
        if collectives.rank() == 0:
            say(text)
        raise MistakeExit(text, exit_code_of(error)) from None
    except collectives.RankZeroError:
        sys.exit(1)  # rank 0 has reported it
    except Exception:
        _show_and_answer(prog)
        raise


def count(text: str, least: int = 1) -> int:
    """Returns the number in a word of the command line, for argparse: by default 1 or more."""
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} given; expected {least} or more")
    return int(text)


def _path(text: str) -> str:
    return os.path.expanduser(text)  # no shell does it in `--output=~/x`


def _auto_or_count(text: str, least: int) -> int | str:
    return text if text == "auto" else count(text, least)


def spawn(
    function: Callable[..., object], args: Sequence[Any], nprocs: int, device: str | None
) -> int:
    """Calls `launch.spawn`; what is put in front here is put in front in the processes, too."""
    from expbase.ranks import launch  # here: few runs need it

    signals = launch.StopSignals()
    with signals.installed():
        return launch.spawn(_spawned, (in_front(), function, args), nprocs, device, signals).code


def _spawned(mixins: Sequence[type], function: Callable[..., object], args: Sequence[Any]) -> None:
    set_in_front(mixins)  # a spawned process has imported everything anew
    function(*args)

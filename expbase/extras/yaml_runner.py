"""Runs described in YAML, one after the other.

    experiment: "{workspace}/train.py:Clicks"  # or package.module:Class
    runner:
      - name: pretrain
        class: train
        epochs: 2
        startup_class_path: "{workspace}/fill.py"
      - {name: test, class: infer, init_model_path: "{output}/pretrain"}

`{workspace}` is the folder of the YAML file, unless `workspace:` names another; `{output}` is
where the runners' folders are. Paths are relative to the YAML file. Every class is loaded and
every config is checked before the first runner starts.
"""

# Source of the keys and the stages: PaddleRec's runner (seed 002).

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expbase.base.did_you_mean import did_you_mean
from expbase.base.files import write_single_file
from expbase.base.json_lines import json_value
from expbase.base.terminal import show
from expbase.checkpoint import layout
from expbase.cli import count, report_user_errors, spawn
from expbase.config import Config, ConfigError, defaults_of, load_yaml
from expbase.experiment import ExperimentBase
from expbase.extras.stage_classes import STAGES, load_class, with_stages
from expbase.help_text import Paragraphs
from expbase.ranks import collectives
from expbase.training import check_training

_FILE_DEFAULTS: dict[str, Any] = {
    "experiment": "",
    "workspace": ".",
    "output": "{workspace}/runs",
    "mode": None,  # a name or a list of names; nothing: all runners
    "config": {},
    "runner": [],
}
# Keys of a runner that are short for a key of the training section.
_SHORT = {
    "epochs": "max_epoch",
    "max_iteration": "max_iteration",
    "print_interval": "log_interval",
    "valid_interval": "valid_interval",
    "save_interval": "save_interval",
    "save_checkpoint_interval": "save_every_epoch",
}
_PATHS = ("data", "init_model_path", "checkpoint_path")
_STAGE_KEYS = {f"{stage}_class_path": stage for stage in STAGES}
# The keys of a runner, with their defaults.
RUNNER_KEYS: dict[str, Any] = {
    "name": "",  # also that of its folder
    "class": "",  # train or infer
    "config": {},  # changes for this runner
    "checkpoints": "last",  # for an infer runner: all, best, last or an iteration
    **dict.fromkeys(_SHORT),
    **dict.fromkeys(("device", *_PATHS), ""),  # this and init_partial as of a training script
    "init_partial": False,
    **dict.fromkeys(_STAGE_KEYS, ""),  # file.py:Class, in place of this stage
}


@dataclass
class ReadyRunner:
    """One runner, ready to start."""

    runner: Config  # its section of the file; its keys are RUNNER_KEYS
    experiment: type[ExperimentBase]  # its stages in front
    config: Config  # checked
    args: argparse.Namespace  # the second argument of the experiment


# --- reading the file ------------------------------------------------------------------------


def read(
    path: str | Path, *, options: Sequence[str] = (), output: str = "", only: str = ""
) -> list[ReadyRunner]:
    """Reads what a YAML file describes, and checks all of it.

    Args:
        path: The file.
        options: KEY VALUE or KEY=VALUE words that change the config of every run.
        output: The folder of the runners' folders, instead of the file's.
        only: The name of the one runner to run, instead of the file's `mode`.

    Returns:
        The runs of its `mode`, in order.

    Raises:
        ConfigError: Something in it cannot be used; the message names the key.
    """
    path = Path(path)
    folder = path.resolve().parent
    plan = _load(path, folder, output)
    experiment = load_class(plan.experiment, f"{path}: experiment", folder)
    if not issubclass(experiment, ExperimentBase):
        raise ConfigError(f"{path}: experiment: {experiment.__name__} is no ExperimentBase.")
    base = defaults_of(experiment)
    base.merge_from_other_cfg(plan.config, f"{path}: config")
    runs = []
    for runner in _chosen(plan, path, only):
        place = f"{path}: runner {runner.name}"
        stages = {
            stage: load_class(runner[key], f"{place}: {key}", folder, STAGES[stage][0])
            for key, stage in _STAGE_KEYS.items()
            if runner[key]
        }
        is_infer = runner["class"] == "infer"
        staged = with_stages(experiment, stages, place, runner_name=runner.name, is_infer=is_infer)
        config = _config_of(runner, base, options, place)
        runs.append(
            ReadyRunner(runner, staged, config, _args_of(runner, folder, Path(plan.output)))
        )
    return runs


def _load(path: Path, folder: Path, output: str) -> Config:
    """Returns the file as a Config, with its placeholders filled and an absolute `output`."""
    plan = Config(_FILE_DEFAULTS)
    plan.merge_from_other_cfg(load_yaml(path), str(path))
    values = {"{workspace}": str((folder / plan.workspace).resolve())}
    plan.output = str(Path(output or folder / _filled(plan.output, values)).resolve())
    values["{output}"] = plan.output
    return Config(_filled(plan, values))


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """Returns the value with its placeholders filled, in lists and mappings, too."""
    if isinstance(value, list):
        return [_filled(item, values) for item in value]
    if isinstance(value, dict):
        return {key: _filled(item, values) for key, item in value.items()}
    if isinstance(value, str):
        for placeholder, path in values.items():
            value = value.replace(placeholder, path)
    return value


def _chosen(plan: Config, path: Path, only: str) -> list[Config]:
    """Returns the runners that are wanted, with the defaults of the keys that are not given."""
    if not plan.runner or not all(isinstance(given, dict) for given in plan.runner):
        raise ConfigError(f"{path}: runner: expected a list of `- name: …` sections.")
    runners: dict[str, Config] = {}
    for index, given in enumerate(plan.runner):
        place = f"{path}: runner[{index}]"
        runner = Config(RUNNER_KEYS)
        runner.merge_from_other_cfg(given, place)
        if not re.fullmatch(r"[\w-][\w.-]*", runner.name) or runner.name in runners:
            raise ConfigError(
                f"{place}.name: {runner.name!r} given; expected a name for a folder, another one "
                "for each runner."
            )
        runner["class"] = runner["class"].removeprefix("single_")
        if runner["class"] not in ("train", "infer"):
            raise ConfigError(f"{place}.class: {runner['class']!r} given; expected train or infer.")
        if runner["class"] == "infer" and not runner.init_model_path:
            raise ConfigError(
                f"{place}.init_model_path: not given; expected what an infer runner evaluates: the "
                "output of a run, a checkpoint or a file with weights."
            )
        runners[runner.name] = runner
    mode = only or plan.mode or [*runners]
    wanted = mode if isinstance(mode, list) else [mode]
    for name in wanted:
        if name not in runners:
            known = did_you_mean(str(name), runners)
            raise ConfigError(f"{path}: mode: no runner {name!r}.{known}")
    return [runners[name] for name in wanted]


def _config_of(runner: Config, base: Config, options: Sequence[str], place: str) -> Config:
    """Returns the file's config, changed by the runner's keys, its config, and the options."""
    config: Config = base.clone()
    given = {ours: runner[key] for key, ours in _SHORT.items() if runner[key] is not None}
    if "max_epoch" in given:
        given = {"max_iteration": 0, **given}  # the epochs alone decide, unless both are given
    config.merge_from_other_cfg({"training": given}, place)
    config.merge_from_other_cfg(runner.config, f"{place}: config")
    config.merge_from_list(options)
    training = config.training
    if "max_epoch" in given and not training.max_epoch and not training.max_iteration:
        raise ConfigError(f"{place}: epochs: 0 given; expected 1 or more.")
    try:
        check_training(training)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    return config


def _args_of(runner: Config, folder: Path, output: Path) -> argparse.Namespace:
    paths = {key: str(folder / runner[key]) if runner[key] else None for key in _PATHS}
    return argparse.Namespace(
        **paths,
        init_partial=runner.init_partial,
        device=runner.device or None,
        output=str(output / runner.name),
    )


# --- running ---------------------------------------------------------------------------------


def execute(runs: Sequence[ReadyRunner]) -> None:
    """Makes the runs, one after the other; ends early if one was stopped.

    Args:
        runs: What `read` has returned.
    """
    for number, run in enumerate(runs, 1):
        experiment = run.experiment(run.config, run.args)
        experiment.logger.info("runner %s (%d of %d)", run.runner.name, number, len(runs))
        experiment.setup()
        if run.runner["class"] == "infer":
            _infer(run, experiment)
            continue
        experiment.run()
        if not experiment.finished:
            return


def _infer(run: ReadyRunner, experiment: ExperimentBase) -> None:
    """Evaluates one or all checkpoints of a run; prints and writes a JSON line for each."""
    source = Path(run.args.init_model_path)
    which = run.runner.checkpoints
    results = []
    with experiment.internals.closing():
        # Rank 0 looks: the others may be on a machine that has no such folder.
        names = collectives.on_rank_zero(lambda: _checkpoints_in(source, which), "checkpoints")
        for name in names or []:
            if name:
                experiment.load_checkpoint(name, run=source)
            else:
                experiment.load_model(source, partial=run.args.init_partial)
            metrics = experiment.evaluate(experiment.test_loader)
            found = {key: json_value(value) for key, value in metrics.items()}
            found |= {"runner": run.runner.name, "checkpoint": name or str(source)}
            results.append(found | {"iteration": experiment.iteration})
        if experiment.rank == 0:
            text = "".join(json.dumps(result) + "\n" for result in results)
            write_single_file(experiment.output_dir / "results.jsonl", [text.encode()])
            show(text, end="")


def _checkpoints_in(source: Path, which: str) -> list[str]:
    """Returns the names of checkpoints, for load_checkpoint; "" stands for a file of weights."""
    if source.is_file():
        return [""]
    if which != "all":
        return [which]
    found = [layout.iteration_of(p) for p in layout.listed(source / layout.FOLDER)]
    return [str(iteration) for iteration in found] or ["last"]  # a checkpoint itself, or an error


# --- the tool --------------------------------------------------------------------------------


def add_parser(tools: Any) -> None:
    """Adds the tool to the command line of `python -m expbase`."""
    parser = tools.add_parser(
        "run",
        usage="%(prog)s FILE [KEY=VALUE ...] [options]",
        help=str(__doc__).partition("\n\n")[0],
        description=__doc__,
        formatter_class=Paragraphs,
        epilog=f"keys of a runner: {', '.join(RUNNER_KEYS)}\n\n"
        "The same command continues where it ended.\n\n"
        "exit codes: 0 finished, 1 error, 78 a mistake in what was given, 124 time limit, "
        "130 Ctrl-C, 143 SIGTERM, SIGUSR1, SIGUSR2 or SIGXCPU",
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="the YAML file")
    add("opts", nargs="*", default=None, action="extend", metavar="KEY=VALUE",
        help="config values for all runners")  # fmt: skip
    add("--output", default="", metavar="DIR", help="folder of the runners' folders")
    add("--only", default="", metavar="NAME", help="the runner of this name alone")
    add("--nprocs", type=count, default=1, metavar="N", help="processes on this machine")
    add("--device", metavar="NAME", help="for all runners that name none")
    add("--fresh", action="store_true", help="move what is in the runners' folders aside first")
    add("--force", action="store_true", help="go on although a config differs from its run's")
    add("--opts", nargs="+", default=None, action="extend", metavar="KEY=VALUE", help="the same")
    parser.set_defaults(run=run, parser=parser, user_errors=())


def run(args: argparse.Namespace) -> int:
    """Runs the tool and returns its exit code."""
    if args.nprocs > 1 and collectives.world_size() == 1:
        return spawn(_run_file, (args,), args.nprocs, args.device)
    _run_file(args)
    return 0


def _run_file(args: argparse.Namespace) -> None:
    with report_user_errors("python -m expbase run"):
        runs = read(args.file, options=args.opts, output=args.output, only=args.only)
        for one in runs:
            one.args.device = one.args.device or args.device
            one.args.fresh = args.fresh
            one.args.force = args.force
        execute(runs)

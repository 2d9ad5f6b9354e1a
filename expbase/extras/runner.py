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

from expbase.cli import Paragraphs, count, report_user_errors, spawn
from expbase.config import Config, ConfigError, check_training, did_you_mean, fill, load_yaml
from expbase.experiment import ExperimentBase
from expbase.extras.stages import STAGES, load_class, with_stages
from expbase.ranks import world
from expbase.record.meter import json_value
from expbase.state import checkpoint

_FILE_DEFAULTS: dict[str, Any] = {
    "experiment": "",
    "workspace": ".",
    "output": "{workspace}/runs",
    "mode": None,  # a name or a list of names; nothing: all runners
    "config": {},
    "runner": [],
}
# Keys of a runner that are short for a key of the training section, and have its default.
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
# The keys of a runner: default and meaning.
RUNNER_KEYS: dict[str, tuple[Any, str]] = {
    "name": ("", "of its folder"),
    "class": ("", "train or infer"),
    "config": ({}, "changes for this runner"),
    "checkpoints": ("last", "of an infer runner: all, best, last or an iteration"),
    **{key: (None, f"training.{ours}") for key, ours in _SHORT.items()},
    **dict.fromkeys(("device", *_PATHS), ("", "as of a training script")),
    "init_partial": (False, "as of a training script"),
    **dict.fromkeys(_STAGE_KEYS, ("", "file.py:Class, in place of this stage")),
}
# What is here for other keys of PaddleRec, by how they begin. Source: its doc/yaml.md.
_PADDLEREC: dict[str | tuple[str, ...], str] = {
    "phase": "valid() says what is evaluated, and several runners are several phases",
    "dataset": "setup_dataloader of the experiment makes the loaders",
    "hyper_parameters": "they are sections of default_config, changed under `config:`",
    "save_inference_": "it is self.export(), or --export of a training script",
    ("save_step_", "save_checkpoint_path"): "each runner has a folder in `output:`",
    "runner_result_dump_path": "results.jsonl of an infer runner has it, metrics.jsonl of a run",
    ("selected_gpus", "fleet_mode"): "--nprocs or paddle's launcher starts several processes",
}


@dataclass
class Run:
    """One runner, ready to start."""

    runner: Config  # its section of the file; its keys are RUNNER_KEYS
    experiment: type[ExperimentBase]  # its stages in front
    config: Config  # checked
    args: argparse.Namespace  # what the experiment is constructed with


# --- reading the file ------------------------------------------------------------------------


def read(path: str | Path, *, options: Sequence[str] = (), output: str = "") -> list[Run]:
    """The runs that a YAML file describes, those of its `mode`, in order.

    Args:
        path: The file.
        options: KEY VALUE or KEY=VALUE words that change the config of every run.
        output: The folder of the runners' folders, instead of the file's.

    Raises:
        ConfigError: Something in it cannot be used; the message names the key.
    """
    path = Path(path)
    plan = _load(path, output)
    folder = path.resolve().parent
    experiment = load_class(plan.experiment, f"{path}: experiment", folder)
    if not issubclass(experiment, ExperimentBase):
        raise ConfigError(f"{path}: experiment: {experiment.__name__} is no ExperimentBase.")
    base = fill(experiment.default_config())
    base.merge_from_other_cfg(plan.config, f"{path}: config")
    runs = []
    for index, given in _chosen(plan, path):
        place = f"{path}: runner[{index}] ({given['name']})"
        runner = _checked_runner(given, base, place)
        stages = {
            stage: load_class(runner[key], f"{place}.{key}", folder, STAGES[stage][0])
            for key, stage in _STAGE_KEYS.items()
            if runner[key]
        }
        staged = with_stages(experiment, stages, place)
        config = _config_of(runner, given, base, options, place)
        runs.append(Run(runner, staged, config, _args_of(runner, folder, Path(plan.output))))
    return runs


def _load(path: Path, output: str) -> Config:
    """The file as a Config, its placeholders filled, `workspace` and `output` absolute."""
    try:
        given = load_yaml(path)
    except ConfigError as error:
        hint = "A value that begins with a { must be in quotes."
        raise ConfigError(f"{error} {hint}" if "not YAML" in str(error) else str(error)) from None
    plan = _merged(_FILE_DEFAULTS, given, str(path))
    folder = path.resolve().parent
    values = {"workspace": str((folder / plan.workspace).resolve())}
    own_output = folder / _filled(plan.output, values, f"{path}: output")
    values["output"] = str(Path(output or own_output).resolve())
    filled = {key: _filled(plan[key], values, f"{path}: {key}") for key in plan}
    return Config({**filled, **values})


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any], place: str) -> Config:
    """The defaults, changed by what is given; keys of PaddleRec are refused with what is here."""
    for key in given:
        for beginning, here in _PADDLEREC.items():
            if str(key).startswith(beginning):
                raise ConfigError(f"{place}: {key}: a key of PaddleRec; here {here}.")
    merged = Config(dict(defaults))
    merged.merge_from_other_cfg(given, place)
    return merged


def _filled(value: Any, values: Mapping[str, str], place: str) -> Any:
    """The value with its `{placeholder}`s filled, in lists and mappings, too."""
    if isinstance(value, list):
        return [_filled(item, values, f"{place}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: _filled(item, values, f"{place}.{key}") for key, item in value.items()}
    if not isinstance(value, str):
        return value

    def fill_one(match: re.Match[str]) -> str:
        if match[0].startswith("{{"):
            return match[0][1:-1]
        if match[1] not in values:
            raise ConfigError(
                f"{place}: {match[0]} in {value!r} is unknown; expected "
                f"{' or '.join(f'{{{name}}}' for name in values)}, or {{{match[0]}}} for the text."
            )
        return values[match[1]]

    return re.sub(r"\{\{\w+\}\}|\{(\w+)\}", fill_one, value)


def _chosen(plan: Config, place: Path) -> list[tuple[int, dict[str, Any]]]:
    """The runners that `mode` names, with their places in the list."""
    runners = plan.runner
    if not runners or not all(isinstance(runner, dict) for runner in runners):
        raise ConfigError(f"{place}: runner: expected a list of `- name: …` sections.")
    names = [runner.get("name") for runner in runners]
    for index, name in enumerate(names):
        is_name = isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*", name)
        if not is_name or name in names[:index]:
            raise ConfigError(
                f"{place}: runner[{index}].name: {name!r} given; expected a name for a folder, "
                "another one for each runner."
            )
    mode = plan.mode or names
    wanted = mode if isinstance(mode, list) else [mode]
    for name in wanted:
        if name not in names:
            raise ConfigError(f"{place}: mode: no runner {name!r}.{did_you_mean(str(name), names)}")
    return [(names.index(name), runners[names.index(name)]) for name in wanted]


def _checked_runner(given: Mapping[str, Any], base: Config, place: str) -> Config:
    """All keys of a runner, with the defaults of those that are not given."""
    defaults = {key: default for key, (default, _) in RUNNER_KEYS.items()}
    defaults |= {key: base.training[ours] for key, ours in _SHORT.items()}
    runner = _merged(defaults, given, place)
    kind = runner["class"].removeprefix("single_")
    checkpoints = runner.checkpoints
    if kind not in ("train", "infer"):
        raise ConfigError(f"{place}.class: {runner['class']!r} given; expected train or infer.")
    runner["class"] = kind
    if not re.fullmatch("all|best|last|[0-9]+", checkpoints):
        raise ConfigError(
            f"{place}.checkpoints: {checkpoints!r} given; expected all, best, last or an iteration."
        )
    if kind == "infer" and not runner.init_model_path:
        raise ConfigError(
            f"{place}.init_model_path: not given; expected what an infer runner evaluates: the "
            "output of a run, a checkpoint or a file with weights."
        )
    return runner


def _config_of(
    runner: Config, given: Mapping[str, Any], base: Config, options: Sequence[str], place: str
) -> Config:
    """The config of a run: the file's, then the runner's keys, its config, and the options."""
    config: Config = base.clone()
    config.training.update({ours: runner[key] for key, ours in _SHORT.items()})
    if "epochs" in given and "max_iteration" not in given:
        config.training.max_iteration = 0  # the epochs alone decide
    config.merge_from_other_cfg(runner.config, f"{place}.config")
    own = runner.config.get("training") or {}
    for key, ours in _SHORT.items():
        if key in given and ours in own:
            raise ConfigError(
                f"{place}: {key} and config.training.{ours} given; expected one: they are the same."
            )
    config.merge_from_list(options)
    try:
        check_training(config.training)
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


def execute(runs: Sequence[Run]) -> None:
    """Makes the runs, one after the other; ends early if one was told to stop."""
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


def _infer(run: Run, experiment: ExperimentBase) -> None:
    """Evaluates one or all checkpoints of a run; prints and writes a JSON line for each."""
    source = Path(run.args.init_model_path)
    which = run.runner.checkpoints
    results = []
    with experiment.closing():
        # Rank 0 looks: the others may be on a machine that has no such folder.
        names = world.on_rank_zero(lambda: _checkpoints_in(source, which), "checkpoints")
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
            checkpoint.write_single_file(experiment.output_dir / "results.jsonl", [text.encode()])
            print(text, end="", flush=True)


def _checkpoints_in(source: Path, which: str) -> list[str]:
    """What to load one after the other, as load_checkpoint names it; "" is a file of weights."""
    if source.is_file():
        return [""]
    if which != "all" or (source / checkpoint.MANIFEST).exists():  # or one checkpoint alone
        return [which]
    found = [checkpoint.iteration_of(p) for p in checkpoint.listed(source / checkpoint.FOLDER)]
    return [str(iteration) for iteration in found] or ["last"]  # there is none: loading says so


# --- the tool --------------------------------------------------------------------------------


def add_parser(tools: Any) -> None:
    """Adds the tool to the command line of `python -m expbase`."""
    keys = "".join(f"\n  {key}: {meaning}" for key, (_, meaning) in RUNNER_KEYS.items())
    parser = tools.add_parser(
        "run",
        help="Runs what a YAML file describes.",
        description=__doc__,
        formatter_class=Paragraphs,
        epilog=f"keys of a runner:{keys}\n\nThe same command continues where it ended.\n\n"
        "exit codes: 0 finished, 1 error, 2 unknown option, 124 time limit, 130 Ctrl-C, "
        "143 SIGTERM or SIGUSR1",
    )
    add = parser.add_argument
    add("file", type=Path, help="the YAML file")
    add("--output", default="", metavar="DIR", help="folder of the runners' folders")
    add("--only", metavar="NAME", help="the runner of this name alone, of those in mode")
    add("--nprocs", type=count, default=1, metavar="N", help="processes on this machine")
    add("--device", metavar="NAME", help="for all runners that name none")
    add("--fresh", action="store_true", help="move what is in the runners' folders aside first")
    add("--force", action="store_true", help="go on although a config differs from its run's")
    add("--opts", nargs="+", default=[], metavar="KEY VALUE", help="config values for all runners")
    add("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="config values, too")
    parser.set_defaults(run=run, user_errors=(ConfigError,))


def run(args: argparse.Namespace) -> int:
    """Runs the tool and returns its exit code."""
    if args.nprocs == 1 or world.world_size() > 1:
        _run_file(args)
        return 0
    with report_user_errors("python -m expbase run"):
        _read(args)  # a mistake in the file is reported before there are processes
    return spawn(_run_file, (args,), args.nprocs, args.device)


def _run_file(args: argparse.Namespace) -> None:
    with report_user_errors("python -m expbase run"):
        execute(_read(args))


def _read(args: argparse.Namespace) -> list[Run]:
    """The runs of the file, changed by the options of the command line."""
    runs = read(args.file, options=[*args.opts, *args.overrides], output=args.output)
    if args.only is not None:
        names = [one.runner.name for one in runs]
        if args.only not in names:
            raise ConfigError(f"--only: {args.only!r} given; expected one of {', '.join(names)}.")
        runs = [runs[names.index(args.only)]]
    for one in runs:
        one.args.device = one.args.device or args.device
        one.args.fresh = args.fresh
        one.args.force = args.force
    return runs

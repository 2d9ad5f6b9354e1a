"""Runs described in YAML, one after the other.

    experiment: "{workspace}/train.py:Clicks"  # or package.module:Class
    mode: [pretrain, test]  # one name, or several in this order
    config:  # changes the experiment's defaults, for all
      optim: {lr: 0.01}
    runner:
      - name: pretrain
        class: train
        epochs: 2
        startup_class_path: "{workspace}/fill.py"
      - name: test
        class: infer
        init_model_path: "{output}/pretrain"

`{workspace}` is the folder of the YAML file, unless `workspace:` names another; `{output}` is
where the runners' folders lie. Paths are relative to the YAML file. Every class is loaded and
every config is checked before the first runner starts.
"""

# Source of the keys and the stages: PaddleRec's runner (seed 002).

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expbase import distributed
from expbase.cli import Paragraphs, count, plainly
from expbase.config import Config, ConfigError, check_training, did_you_mean, fill, load_yaml
from expbase.experiment import ExperimentBase
from expbase.extras.stages import STAGES, ClassLoader, with_stages
from expbase.logs import json_value
from expbase.state import checkpoint
from expbase.state.checkpoint import CheckpointError

RESULTS = "results.jsonl"
_TOP = ("experiment", "workspace", "output", "mode", "config", "runner")
_CLASSES = {"train": "train", "single_train": "train", "infer": "infer", "single_infer": "infer"}
# What stands in a runner beside its config, and the training keys that it is short for.
_SHORT = {
    "epochs": "max_epoch",
    "max_iteration": "max_iteration",
    "print_interval": "log_interval",
    "valid_interval": "valid_interval",
    "save_interval": "save_interval",
    "save_checkpoint_interval": "save_every_epoch",
}
_ARGS = ("device", "data", "init_model_path", "init_partial", "checkpoint_path")
_PATHS = ("data", "init_model_path", "checkpoint_path")
_KEYS = (
    *("name", "class", "config", "checkpoints"),
    *(f"{stage}_class_path" for stage in STAGES),
    *_SHORT,
    *_ARGS,
)


_KEYS_HELP = "\n".join(
    [
        "keys of a runner:",
        "  name: of its folder",
        "  class: train or infer",
        "  config: changes for this runner",
        "  checkpoints: of an infer runner: all, best, last or an iteration",
        *(f"  {key}: training.{ours}" for key, ours in _SHORT.items()),
        *(f"  {key}: as of a training script" for key in _ARGS),
        *(f"  {stage}_class_path: file.py:Class, in place of this stage" for stage in STAGES),
    ]
)


@dataclass
class Run:
    """One runner, ready to start.

    Attributes:
        name: Of the runner; its folder in the output.
        trains: Or only infers.
        experiment: The class, its stages in front.
        config: Checked.
        args: What the experiment is given.
        checkpoints: For an infer runner: all, best, last or an iteration.
        workspace: The folder to import from.
    """

    name: str
    trains: bool
    experiment: type[ExperimentBase]
    config: Config
    args: argparse.Namespace
    checkpoints: str
    workspace: Path


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
    plan, folders = _load(path, output)
    loader = ClassLoader()
    place = f"{path}: experiment"
    experiment = loader.load(_absolute(plan["experiment"], folders["file"]), place)
    if not issubclass(experiment, ExperimentBase):
        raise ConfigError(f"{place}: {experiment.__name__} is no ExperimentBase.")
    runs = []
    for index, runner in _chosen(plan, str(path)):
        place = f"{path}: runner[{index}] ({runner['name']})"
        _check_runner(runner, place)
        config = fill(experiment.default_config())
        config.merge_from_other_cfg(plan.get("config") or {}, f"{path}: config")
        config.merge_from_other_cfg({"training": _short(runner, place)}, place)
        config.merge_from_other_cfg(runner.get("config") or {}, f"{place}.config")
        config.merge_from_list(options)
        try:
            check_training(config.training)
            staged = with_stages(experiment, _stages(runner, place, loader, folders["file"]))
        except ConfigError as error:
            raise ConfigError(str(error) if place in str(error) else f"{place}: {error}") from None
        trains = _CLASSES[runner["class"]] == "train"
        checkpoints = str(runner.get("checkpoints", "last"))
        args = _args(runner, folders)
        runs.append(
            Run(runner["name"], trains, staged, config, args, checkpoints, folders["workspace"])
        )
    return runs


def _load(path: Path, output: str) -> tuple[dict[str, Any], dict[str, Path]]:
    """The file with its placeholders filled, and its folders: "file", "workspace", "output"."""
    try:
        plan = load_yaml(path)
    except ConfigError as error:
        hint = ""
        if "not YAML" in str(error):
            hint = ' A value that begins with a { stands in quotes: "{workspace}/train.py:Class".'
        raise ConfigError(f"{error}{hint}") from None
    _check_keys(plan, _TOP, str(path))
    if not isinstance(plan.get("experiment"), str):
        raise ConfigError(
            f"{path}: experiment: {plan.get('experiment')!r} given; expected "
            '"{workspace}/train.py:Class" or package.module:Class.'
        )
    for key in ("workspace", "output"):
        if not isinstance(plan.get(key, ""), str):
            raise ConfigError(
                f"{path}: {key}: {plan[key]!r} given; expected a path. One that begins with a "
                "{ stands in quotes."
            )
    _check_sections(plan, str(path))
    file = path.resolve().parent
    workspace = (file / plan.pop("workspace", ".")).resolve()
    values = {"workspace": str(workspace)}
    own = _filled(plan.pop("output", "{workspace}/runs"), values, f"{path}: output")
    folders = {"file": file, "workspace": workspace}
    folders["output"] = Path(output).resolve() if output else (file / own).resolve()
    values["output"] = str(folders["output"])
    return {k: _filled(v, values, f"{path}: {k}") for k, v in plan.items()}, folders


def _stages(
    runner: Mapping[str, Any], place: str, loader: ClassLoader, folder: Path
) -> dict[str, type]:
    keys = {stage: f"{stage}_class_path" for stage in STAGES if runner.get(f"{stage}_class_path")}
    return {
        stage: loader.load(_absolute(runner[key], folder), f"{place}.{key}", STAGES[stage][0])
        for stage, key in keys.items()
    }


def _args(runner: Mapping[str, Any], folders: Mapping[str, Path]) -> argparse.Namespace:
    given = {key: runner.get(key) for key in _ARGS}
    given |= {key: _absolute(given[key], folders["file"]) for key in _PATHS if given[key]}
    output = str(folders["output"] / runner["name"])
    return argparse.Namespace(**given, output=output, fresh=False, force=False)


def execute(runs: Sequence[Run]) -> None:
    """Makes the runs, one after the other; ends early if one was told to stop.

    Raises:
        SystemExit: One was stopped by a signal or a time limit.
    """
    for number, run in enumerate(runs, 1):
        if distributed.rank() == 0:
            print(f"runner {run.name} ({number} of {len(runs)})", file=sys.stderr, flush=True)
        with ClassLoader().imports_from(run.workspace):
            if run.trains:
                exp = run.experiment(run.config, run.args)
                exp.setup()
                exp.run()
                if not exp.finished:
                    return
            else:
                infer(run)


def infer(run: Run) -> list[dict[str, Any]]:
    """Evaluates one or all checkpoints of a run, and writes the results as JSON lines.

    Returns:
        `runner`, `checkpoint`, `iteration` and the metrics, for each checkpoint.
    """
    source = run.args.init_model_path
    exp = run.experiment(
        run.config, argparse.Namespace(**{**vars(run.args), "init_model_path": None})
    )
    exp.setup()
    results = []
    with exp.closing():
        names = distributed.on_rank_zero(lambda: _names(source, run.checkpoints), "checkpoints")
        for name in names or []:
            if source is not None:
                _bring_back(exp, Path(source), name)
            found = {
                "runner": run.name,
                "checkpoint": name or str(source),
                "iteration": exp.iteration,
            }
            metrics = exp.evaluate(exp.test_loader)
            results.append({n: json_value(value) for n, value in metrics.items()} | found)
        if exp.rank == 0:
            text = "".join(json.dumps(result) + "\n" for result in results)
            checkpoint.write_single_file(exp.output_dir / RESULTS, [text.encode()])
            print(text, end="", flush=True)
    return results


def _bring_back(exp: ExperimentBase, source: Path, name: str) -> None:
    if name:
        exp.load_checkpoint(name, run=source)
    else:
        exp.load_model(source, partial=bool(getattr(exp.args, "init_partial", False)))


def _names(source: str | None, which: str) -> list[str]:
    """What to load one after the other: iterations, or "" for a file with weights."""
    if source is None or Path(source).is_file():
        return [""]
    path = Path(source)
    if (path / checkpoint.MANIFEST).exists() or which != "all":
        return [which]
    found = [checkpoint.iteration_of(p) for p in checkpoint.listed(path / checkpoint.FOLDER)]
    if not found:
        raise CheckpointError(
            f"{path}: no checkpoint there; expected the output of a train runner."
        )
    return [str(iteration) for iteration in found]


# --- reading the file ------------------------------------------------------------------------


def _chosen(plan: Mapping[str, Any], place: str) -> list[tuple[int, dict[str, Any]]]:
    """The runners that `mode` names, with their places in the list."""
    runners = plan.get("runner")
    if (
        not isinstance(runners, list)
        or not all(isinstance(r, dict) for r in runners)
        or not runners
    ):
        raise ConfigError(f"{place}: runner: expected a list of `- name: …` sections.")
    names = [runner.get("name") for runner in runners]
    for index, name in enumerate(names):
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]*[\w-][\w.-]*", name):
            raise ConfigError(
                f"{place}: runner[{index}].name: {name!r} given; expected a name for a folder."
            )
        if names.index(name) != index:
            raise ConfigError(f"{place}: runner[{index}].name: {name!r} is there twice.")
    mode = plan.get("mode", names)
    wanted = mode if isinstance(mode, list) else [mode]
    if mode is None or not wanted:
        raise ConfigError(f"{place}: mode: nothing given; expected some of {', '.join(names)}.")
    for name in wanted:
        if name not in names:
            raise ConfigError(f"{place}: mode: no runner {name!r}.{did_you_mean(str(name), names)}")
    return [(names.index(name), dict(runners[names.index(name)])) for name in wanted]


def _check_runner(runner: Mapping[str, Any], place: str) -> None:
    _check_keys(runner, _KEYS, place)
    _check_sections(runner, place)
    kind = runner.get("class")
    if not isinstance(kind, str) or kind not in _CLASSES:
        hint = ""
        if str(kind).startswith("cluster"):
            hint = (
                " The parameter server is not in today's PaddlePaddle; several processes: launch."
            )
        raise ConfigError(f"{place}.class: {kind!r} given; expected train or infer.{hint}")
    if "checkpoints" in runner and _CLASSES[kind] == "train":
        raise ConfigError(
            f"{place}.checkpoints: given to a train runner; expected an infer runner."
        )
    if not re.fullmatch("all|best|last|[0-9]+", str(runner.get("checkpoints", "last"))):
        raise ConfigError(
            f"{place}.checkpoints: {runner['checkpoints']!r} given; expected all, best, last or an "
            "iteration."
        )
    if _CLASSES[kind] == "infer" and not runner.get("init_model_path"):
        raise ConfigError(
            f"{place}.init_model_path: not given; expected the output of a run, a checkpoint or a "
            "file with weights: an infer runner looks at them."
        )
    for key in (*_PATHS, *(f"{stage}_class_path" for stage in STAGES)):
        if not isinstance(runner.get(key) or "", str):
            raise ConfigError(
                f"{place}.{key}: {runner[key]!r} given; expected a path. One that begins with a "
                "{ stands in quotes."
            )
    if not isinstance(runner.get("device") or "", str):
        raise ConfigError(f"{place}.device: {runner['device']!r} given; expected cpu, gpu, gpu:0 …")
    if not isinstance(runner.get("init_partial") or False, bool):
        raise ConfigError(
            f"{place}.init_partial: {runner['init_partial']!r} given; expected true or false."
        )


def _short(runner: Mapping[str, Any], place: str) -> dict[str, Any]:
    training = {ours: runner[key] for key, ours in _SHORT.items() if key in runner}
    own = (runner.get("config") or {}).get("training") or {}
    for key, ours in _SHORT.items():
        if key in runner and ours in own:
            raise ConfigError(
                f"{place}: {key} and config.training.{ours} given; expected one: they are the same."
            )
    if "epochs" in runner and "max_iteration" not in runner:
        training["max_iteration"] = 0  # the passes alone decide
    return training


def _check_sections(plan: Mapping[str, Any], place: str) -> None:
    """Checks that the config is a section, and the one for training in it."""
    config = plan.get("config") or {}
    if not isinstance(config, dict):
        raise ConfigError(
            f"{place}: config: {config!r} given; expected a section of `key: value`s."
        )
    training = config.get("training") or {}
    if not isinstance(training, dict):
        raise ConfigError(
            f"{place}: config.training: {training!r} given; expected a section of `key: value`s."
        )


def _check_keys(section: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for key in section:
        if key not in known:
            raise ConfigError(f"{place}: unknown key {key!r}.{did_you_mean(str(key), known)}")


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


def _absolute(path: Any, folder: Path) -> str:
    """A path of the file, relative to it; what names a module stays."""
    text = str(path)
    file = text.rpartition(":")[0] if re.search(r":\w+$", text) else text
    is_module = re.fullmatch(r"[\w.]+", file) and text != file and not file.endswith(".py")
    return text if is_module else str(folder / text)


# --- the tool --------------------------------------------------------------------------------


def add_parser(tools: Any) -> None:
    """Adds the tool to the command line of `python -m expbase`."""
    parser = tools.add_parser(
        "run",
        help="run what a YAML file describes",
        description=__doc__,
        formatter_class=Paragraphs,
        epilog=_KEYS_HELP
        + "\n\nThe same command continues where it was ended.\n\nexit codes: 0 finished, 1 error, "
        "2 unknown option, 124 time limit, 130 Ctrl-C, 143 SIGTERM or SIGUSR1",
    )
    add = parser.add_argument
    add("file", type=Path, help="the YAML file")
    add("--output", default="", metavar="DIR", help="folder of the runners' folders")
    add(
        "--nprocs",
        type=count,
        default=1,
        metavar="N",
        help="processes on this machine (default: 1)",
    )
    add("--device", metavar="NAME", help="for all runners that name none")
    add("--fresh", action="store_true", help="move what is in the runners' folders aside first")
    add("--force", action="store_true", help="go on although a config differs from its run's")
    add(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="config values for every runner: optim.lr 0.1 (or KEY=VALUE)",
    )
    add("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="config values, too")
    parser.set_defaults(run=run, user_errors=(ConfigError,))


def run(args: argparse.Namespace) -> int:
    """Runs the tool; gives its exit code."""
    if args.nprocs > 1 and distributed.world_size() == 1:
        _read(args)  # its errors come once, and here
        return distributed.spawn(_run_file, (args,), args.nprocs, args.device)
    _run_file(args)
    return 0


def _run_file(args: argparse.Namespace) -> None:
    with plainly("python -m expbase run"):
        execute(_read(args))


def _read(args: argparse.Namespace) -> list[Run]:
    """The runs of the file, changed by the options of the command line."""
    runs = read(args.file, options=[*args.opts, *args.overrides], output=args.output)
    for one in runs:
        one.args.device = one.args.device or args.device
        one.args.fresh, one.args.force = args.fresh, args.force
    return runs

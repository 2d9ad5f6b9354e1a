"""What docs/stable.md promises for 1.x, as it was in 1.0: a name that is gone fails here.

These lists may grow, and nothing in them may change before 2.0. Whether the code has names beside
them is not asked here: test_face.py, test_package.py and test_cli.py decide on new ones.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pages import TEXT
from tiny import Tiny, trained

import expbase
from expbase import ExperimentBase, default_argument_parser
from expbase.__main__ import TOOLS, main, parser_of
from expbase.base.exit_codes import ExitCode
from expbase.checkpoint import layout
from expbase.cli import add_options_of_main
from expbase.engine.run_dir import CONFIG
from expbase.extras import all_events, components, mixins, prediction
from expbase.record.visualizer import Visualizer
from expbase.training import TRAINING

FUNCTIONS = """
    default_argument_parser()
    get_default_training_config()
    main(experiment, *, parser=None, argv=None)
    on(event, *, every=None, once=None, filter_fn=None)
    rank_zero_only(function)
"""
CLASSES = """
    Config(init_dict=None)
    ConfigError
    ExperimentBase(config, args)
"""
OF_CONFIG = """
    clone()
    merge_from_file(paths)
    merge_from_list(words)
"""
METHODS = """
    setup_dataloader()
    setup_model()
    train_batch()
    valid()
    default_config()
    setup()
    init_parallel()
    setup_output_dir()
    dump_config()
    setup_visualizer()
    setup_logger()
    setup_checkpointer()
    check_setup()
    data_parallel(layer, **options)
    unwrap(layer)
    register_stateful(*names, by_share=False)
    exclude_from_state(*names)
    resume_or_load()
    run()
    close()
    train()
    going_on()
    end_iteration()
    new_epoch()
    read_batch()
    micro_batches()
    backward(loss)
    step_optimizers(*optimizers)
    log(mapping=None, /, **scalars)
    stop(reason="stop() was called", *, on_all_ranks=False)
    evaluate(loader=None, *, name="")
    valid_batches(loader=None)
    average(metrics, weight)
    gather(value)
    save()
    load_checkpoint(which, *, run=None)
    save_model(path, layer=None)
    load_model(path, *, into=None, partial=False, rename=None)
    export(path, input_spec=None, layer=None)
"""
ATTRIBUTES = (
    "config args iteration epoch batches_per_epoch total_iterations finished end_reason logger "
    "output_dir checkpoint_dir rank world_size parallel internals"
).split()
SET_BY_YOU = "model optimizer train_loader valid_loader test_loader visualizer".split()
EVENTS = """
    prepare()
    startup()
    on_train_begin()
    on_train_epoch_begin()
    on_train_batch_begin()
    on_before_optimizers_step()
    on_train_batch_end()
    on_log(metrics)
    on_train_epoch_end()
    on_evaluate_end(results)
    on_save_checkpoint()
    on_load_checkpoint(states)
    on_checkpoint_written(path)
    on_exception(exception)
    on_train_end()
    terminal()
"""
OF_ALL_EVENTS = """
    on_setup_begin()
    on_setup_end()
    on_fetch_data_begin()
    on_fetch_data_end()
    on_batch_read(batch, indices)
    on_before_backward(loss)
    on_after_backward()
    on_after_optimizers_step()
    on_before_zero_grad()
    on_after_zero_grad()
    on_evaluate_begin()
    on_valid_batch_end(batch, indices)
    on_save_model()
    on_load_model()
"""
OF_PREDICTION = """
    on_predict_begin()
    on_predict_batch_end(outputs)
    on_predict_end(results)
"""
VISUALIZER = """
    add_scalar(tag, value, step=None)
    add_image(tag, image, step=None)
    add_figure(tag, figure, step=None)
    add_audio(tag, samples, step=None, *, sample_rate=8000)
    add_histogram(tag, values, step=None, *, buckets=10)
    add_text(tag, text, step=None)
"""
SECTIONS = {
    "EarlyStopping": {"early_stopping": {"patience": 3, "min_delta": 0.0}},
    "ExponentialMovingAverage": {"ema": {"decay": 0.999}},
    "GradientClipping": {"clipping": {"max_norm": 1.0}},
}
KEYS = {
    "max_iteration": 0, "max_epoch": 0, "valid_interval": None, "save_interval": None,
    "log_interval": 10, "valid_every_epoch": 0, "save_every_epoch": 0, "save_seconds": 0,
    "accumulation_steps": 1, "shares": 0, "skip_updates": [], "seed": 0, "deterministic": False,
    "keep_last": 3, "keep_every": 0, "keep_best": 1, "monitor": "", "monitor_mode": "max",
    "time_limit_seconds": 0, "hang_seconds": 600, "hang_action": "report", "nonfinite": "error",
}  # fmt: skip
OPTIONS = (
    "config data output checkpoint_path init_model_path init_partial device nprocs ngpu fresh "
    "force opts evaluate export restarts print_config smoke"
)
OF_TOOLS = {
    "new": "from",
    "run": "output only nprocs device fresh force opts",
    "board": "host port",
    "ls": "columns sort reverse seeds json",
    "plot": "output metrics smooth single",
    "reproduce": "from to parts seed digest jobs here updates python record receipts",
    "rm": "yes",
    "show": "digest",
    "verify": "output iterations kills ranks",
}
FILES = """
    config.yaml metrics.jsonl validations.jsonl ledger.jsonl worker_0.log vdlrecords.run.log
    checkpoints/step-00000004/model.safetensors checkpoints/step-00000004/optimizer.safetensors
    checkpoints/step-00000004/state.json checkpoints/step-00000004/manifest.json
    digest.txt
""".split()
EMPTY = inspect.Parameter.empty
BY_PLACE = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
EXIT_CODES = {0, 1, 78, 124, 129, 130, 143}


def written(lines: str) -> Iterator[tuple[str, inspect.Signature]]:
    """The name and the parameters of each line."""
    for line in lines.split("\n"):
        if line.strip():
            made: dict[str, Any] = {}
            exec(f"def {line.strip()}: ..." if "(" in line else f"def {line.strip()}(): ...", made)
            yield line.strip().partition("(")[0], inspect.signature([*made.values()][-1])


def takes(owner: Any, name: str) -> list[inspect.Parameter]:
    """What a function takes now, or a class, or a method called on an object."""
    member = inspect.getattr_static(owner, name)
    if inspect.isclass(member) and issubclass(member, Exception):
        return []
    parameters = [*inspect.signature(getattr(owner, name)).parameters.values()]
    return parameters[inspect.isclass(owner) and inspect.isfunction(member) :]


def is_optional(parameter: inspect.Parameter) -> bool:
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return parameter.default is not EMPTY or parameter.kind in variable


def changes(owner: Any, lines: str, *, exact: bool = False) -> list[str]:
    """What a call that was right in 1.0 would stumble over.

    Args:
        owner: A module, or a class.
        lines: The names with their parameters, as they were.
        exact: Whether it is no call, but an override: then another parameter breaks it, too.
    """
    found = []
    for name, signature in written(lines):
        if not hasattr(owner, name):
            found.append(f"{name} is gone")
            continue
        now = [parameter.replace(annotation=EMPTY) for parameter in takes(owner, name)]
        then = [*signature.parameters.values()]
        new = [] if exact else [p for p in now if p not in then and is_optional(p)]
        # A new one by place, in front of an old one, would take its value.
        places = [p for p in now if p.kind in BY_PLACE][: sum(p.kind in BY_PLACE for p in then)]
        if [p for p in now if p not in new] != then or [p for p in places if p in new]:
            found.append(f"{name}{inspect.Signature(now)}, and it was {name}{signature}")
    return found


def test_what_from_expbase_import_gives_is_there() -> None:
    assert changes(expbase, FUNCTIONS + CLASSES) == []
    assert changes(expbase.Config, OF_CONFIG) == []
    assert {name for name, _ in written(FUNCTIONS + CLASSES)} <= {*expbase.__all__}
    assert re.fullmatch(r"1\.\d+\.\d+", expbase.__version__)


def test_the_methods_and_attributes_of_an_experiment_are_there() -> None:
    assert changes(ExperimentBase, METHODS) == []
    static = (inspect.getattr_static(ExperimentBase, name) for name in ATTRIBUTES)
    assert all(isinstance(attribute, property) for attribute in static)
    assert {*SET_BY_YOU} <= {*ExperimentBase.__annotations__}
    assert changes(Visualizer, VISUALIZER) == []
    assert hasattr(Visualizer, "writer")


def test_the_events_are_there_and_take_what_they_took() -> None:
    assert changes(ExperimentBase, EVENTS, exact=True) == []
    assert changes(all_events.AllEvents, OF_ALL_EVENTS, exact=True) == []


@pytest.mark.parametrize("name", SECTIONS)
def test_the_mixins_and_the_keys_of_their_sections_are_there(name: str) -> None:
    config = getattr(mixins, name).default_config()
    for section, keys in SECTIONS[name].items():
        assert {**config[section], **keys} == {**config[section]}


def test_prediction_and_the_sampler_are_there() -> None:
    assert changes(prediction.Prediction, "predict(loader)\npredict_batch(batch)") == []
    assert changes(prediction.Prediction, OF_PREDICTION, exact=True) == []
    permutation = importlib.import_module("expbase.extras.permutation")
    assert changes(permutation, "PermutationSampler(data, seed=0)") == []


def test_the_components_are_there() -> None:
    phase = 'Reader(phase="train")\nBackbone(phase="train")\nHead(phase="train")\n'
    task = "Task(head, loader=None, mix_ratio=1.0, auxiliary=False)\n"
    assert (
        changes(components, f"{phase}{task}Composed(backbone, heads)\nMultiHead(config, args)")
        == []
    )
    kept = {
        components.Reader: "outputs_attr sample require_attr register_with clone get_epoch_outputs "
        "num_examples",
        components.Backbone: "inputs_attr outputs_attr get_epoch_outputs",
        components.Head: "inputs_attrs outputs_attr epoch_inputs_attrs batch_postprocess reset "
        "get_results epoch_postprocess",
        components.Composed: "in_phase for_export",
        components.MultiHead: "setup_tasks predict_head",
    }
    for cls, names in kept.items():
        assert [name for name in names.split() if not hasattr(cls, name)] == []


def test_the_keys_of_training_have_their_defaults() -> None:
    assert {**TRAINING, **KEYS} == TRAINING


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {word.removeprefix("--") for action in parser._actions for word in action.option_strings}


def test_the_options_of_a_script_are_there() -> None:
    parser = default_argument_parser()
    add_options_of_main(parser)
    assert {*OPTIONS.split()} <= options_of(parser)
    args = parser.parse_args(["optim.lr=1", "--opts", "a", "2"])
    assert args.opts == ["optim.lr=1", "a", "2"]


def test_the_tools_and_their_options_are_there() -> None:
    [tools] = (a.choices for a in parser_of(TOOLS)._actions if isinstance(a.choices, dict))
    gone = {name: {*words.split()} - options_of(tools[name]) for name, words in OF_TOOLS.items()}
    assert {name: words for name, words in gone.items() if words} == {}


def test_the_exit_codes_are_these() -> None:
    assert {*map(int, ExitCode)} >= EXIT_CODES
    assert f"| {', '.join(map(str, sorted(EXIT_CODES)))} |" in TEXT["stable"]


def test_a_checkpoint_has_the_format_that_the_page_names() -> None:
    """A greater number needs a reader of each one that a 1.x has written, and another page."""
    assert layout.FORMAT == 15
    assert f"writes format {layout.FORMAT}, and each later 1.x reads it" in TEXT["stable"]


def lines(path: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_these_files_and_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trained(Tiny, run, max_iteration=4, valid_interval=4, save_interval=2, monitor="accuracy")
    assert [name for name in FILES if not (run / name).is_file()] == []
    assert {*FILES[:1]} == {CONFIG}
    counters = {"iteration", "epoch", "time"}
    metrics, results, ledger = (
        lines(run / f"{name}.jsonl") for name in ("metrics", "validations", "ledger")
    )
    assert {*counters, "train/loss", "speed/data_wait"} <= {*metrics[0]}
    assert {*counters, "valid/accuracy"} <= {*metrics[-1]}
    assert {*counters, "valid/accuracy"} <= {*results[0]}
    events = {line["event"]: {*line} for line in ledger}
    common = {"event", "time", "iteration"}
    assert common | {"command", "config", "packages", "git"} <= events["start"]
    assert common | {"reason", "exit_code"} <= events["end"]
    assert common | {"digest"} <= events["digest"]
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"name", "state", "iteration", "metrics", "config", "experiment", "digest"} <= {*listed}


def test_the_page_names_what_is_held_here_and_not_in_a_table_of_another_page() -> None:
    names = {name for name, _ in written(FUNCTIONS + CLASSES)} | {*SECTIONS, *OF_TOOLS}
    names |= {*components.__all__, "Prediction", "AllEvents", "PermutationSampler"}
    assert [name for name in sorted(names) if f"`{name}`" not in TEXT["stable"]] == []


def test_a_change_that_breaks_a_call_is_seen() -> None:
    class Then:
        def save(self, path: str, layer: Any = None) -> None: ...

    class Now:
        def save(self, path: str, more: int = 0, layer: Any = None) -> None: ...
        def more(self, path: str, layer: Any = None, *, also: int = 0) -> None: ...

    assert changes(Then, "save(path, layer=None)") == []
    assert changes(Then, "load(path)") == ["load is gone"]
    for line in ("save(path)", "save(file, layer=None)", "save(path, layer=1)", "save()"):
        assert changes(Then, line, exact=True), line
    assert changes(Then, "save()")
    assert not changes(Then, "save(path)")
    assert changes(Now, "save(path, layer=None)")
    assert changes(Now, "more(path, layer=None)") == []

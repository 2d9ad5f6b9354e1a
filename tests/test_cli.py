"""The command line: its options, where a value comes from, and the answers to wrong usage."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paddle
import pytest
import yaml
from tiny import Tiny

from expbase import (
    Config,
    ConfigError,
    ExperimentBase,
    __version__,
    cli,
    default_argument_parser,
    main,
    mixins_in_front,
)
from expbase.checkpoint.layout import CheckpointError
from expbase.cli import load_config, report_user_errors
from expbase.config import fill_in, load_yaml
from expbase.mixins_in_front import put_in_front
from expbase.ranks import collectives, launch
from expbase.training import resolved


class Demo(ExperimentBase):
    """An experiment as far as the command line looks."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.optim = Config({"lr": 0.1, "momentum": 0.9, "name": "a/b"})
        return config


class Short(ExperimentBase):
    """One whose defaults hold no more than they must."""

    @classmethod
    def default_config(cls) -> Config:
        return Config({"training": {"max_iteration": 4, "valid_interval": 2, "save_interval": 2}})


def parsed(*words: str) -> argparse.Namespace:
    return default_argument_parser().parse_intermixed_args(words)


def loaded(*words: str) -> Config:
    return load_config(Demo, parsed(*words))


def test_the_parser_has_the_documented_options_and_no_others() -> None:
    assert vars(parsed()) == {
        "config": None, "data": None, "output": None, "checkpoint_path": None,
        "init_model_path": None, "init_partial": False, "device": None, "nprocs": 1, "ngpu": 1,
        "fresh": False, "force": False, "advice": True, "evaluate": None, "export": None,
        "opts": [],
    }  # fmt: skip
    args = parsed("--fresh", "--force", "--nprocs", "2", "--device", "gpu:0")
    assert (args.fresh, args.force) == (True, True)
    assert (args.nprocs, args.device) == (2, "gpu:0")


@pytest.mark.parametrize(
    ("words", "nprocs", "ngpu", "device"),
    [
        ("", 1, 1, None),
        ("--ngpu 2", 2, 2, None),
        ("--nprocs 2", 2, 2, None),
        ("--ngpu 0", 1, 0, "cpu"),
        ("--ngpu 0 --nprocs 2", 2, 0, "cpu"),
        ("--nprocs 2 --ngpu 0", 2, 0, "cpu"),
        ("--ngpu auto", 0, 1, None),
    ],
)
def test_paddlespeechs_word_for_processes_is_taken_and_0_is_the_cpu(
    words: str, nprocs: int, ngpu: int, device: str | None
) -> None:
    args = parsed(*words.split())
    assert (args.nprocs, args.ngpu, args.device) == (nprocs, ngpu, device)


def test_an_experiment_of_paddlespeechs_reads_ngpu(tmp_path: Path) -> None:
    read = []

    class Speech(Tiny):
        def setup_model(self) -> None:
            read.append((self.args.ngpu, paddle.get_device()))
            super().setup_model()

    argv = ["--output", str(tmp_path), "--ngpu", "0", "training.max_iteration=1"]
    main(Speech, argv=argv)
    assert read == [(0, "cpu")]


@pytest.mark.parametrize("option", ["--init_model_path", "--checkpoint_path", "--output"])
def test_an_empty_path_of_weights_or_a_run_is_a_mistake(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(Demo, argv=[option, ""])
    assert caught.value.code == 78
    assert f"{option}: '' given; expected " in capsys.readouterr().err


def test_options_without_effect_are_told(tmp_path: Path) -> None:
    for name, words in {
        "data": ["--data", ""], "device": ["--device="], "config": ["--config", ""],
        "init_partial": ["--init_partial"], "": [],
    }.items():  # fmt: skip
        run = tmp_path / (name or "none")
        main(Tiny, argv=["--output", str(run), "training.max_iteration=1", *words])
        log = (run / "worker_0.log").read_text()
        assert log.count("has no effect") == bool(name)
        assert f"WARNING: --{name}: " in log or not name


def test_an_empty_config_file_does_not_hide_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("optim: {lr: 0.2}\n")
    given = ["--config", str(tmp_path / "c.yaml")]
    for words in [*given, "--config", ""], ["--config", "", *given]:
        assert loaded(*words).optim.lr == 0.2
        assert sorted(parsed(*words).config) == ["", given[1]]


def test_the_home_folder_in_a_path_is_meant_where_no_shell_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("output", "data", "checkpoint_path", "init_model_path", "config")
    args = vars(parsed(*[f"--{name}=~/x" for name in names], "--device=~/x"))
    assert {args[name] for name in names} == {str(tmp_path / "x")}
    assert args["device"] == "~/x"
    main(Tiny, argv=["--output=~/run", "training.max_iteration=1"])
    assert (tmp_path / "run/ledger.jsonl").exists()


def test_help_has_four_groups_and_the_output_first() -> None:
    parser = default_argument_parser()
    cli.add_options_of_main(parser)
    cli.add_options_of_main(parser)  # as main does that is called again
    text = parser.format_help()
    groups = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert groups == ["the run", "where it begins", "where it runs", "looking at it"]
    first, *_ = re.findall(r"^  (--\w+)", text, re.MULTILINE)
    assert first == "--output"
    assert "the run:\n  All keys of the config, with their values: --print_config.\n" in text
    assert text.count("--restarts N  ") == 1


def test_options_of_a_parent_parser_are_in_its_groups() -> None:
    parser = argparse.ArgumentParser(parents=[default_argument_parser()], add_help=False)
    cli.add_options_of_main(parser)
    assert parser.format_help().count("the run:") == 1
    assert parser.parse_args(["--output", "x", "--smoke", "a=1"]).opts == ["a=1"]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(Demo, argv=["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"expbase {__version__}\n")


def test_options_beat_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("optim: {lr: 0.2}\ntraining: {seed: 2}\n")
    config = loaded("--config", str(tmp_path / "c.yaml"), "training.seed=3")
    assert (config.optim.lr, config.optim.momentum, config.training.seed) == (0.2, 0.9, 3)


@pytest.mark.parametrize(
    "words",
    [
        "--device cpu optim.lr=1 training.seed=3",
        "optim.lr=1 --device cpu training.seed=3",
        "--device cpu --opts optim.lr=1 training.seed 3",
        "optim.lr=1 --opts training.seed 3 --device cpu",
        "--opts optim.lr 1 --device cpu training.seed=3",
        "--opts optim.lr 1 --device cpu --opts training.seed 3",
    ],
)
def test_config_values_stand_before_and_after_the_other_options(words: str) -> None:
    config = loaded(*words.split())
    assert (config.optim.lr, config.training.seed) == (1.0, 3)
    assert parsed(*words.split()).device == "cpu"


def test_a_negative_value_is_no_option() -> None:
    assert loaded("--opts", "optim.lr", "-1", "optim.momentum=-1e-3").optim == {
        "lr": -1.0, "momentum": -0.001, "name": "a/b",
    }  # fmt: skip


def test_of_several_config_files_a_later_one_wins_as_print_config_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.yaml").write_text("optim: {lr: 1}\ntraining: {seed: 1, save_interval: 7}\n")
    (tmp_path / "large.yaml").write_text("training: {seed: 2}\n")
    files = [f"--config={tmp_path / name}" for name in ("base.yaml", "large.yaml")]
    main(Demo, argv=[*files, "--print_config"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["optim"]["lr"] == 1.0
    assert (shown["training"]["seed"], shown["training"]["save_interval"]) == (2, 7)


def test_print_config_prints_what_load_yaml_reads_back_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(Demo, argv=["optim.lr=1e-5", "--print_config", "training.seed=3"])
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert load_yaml(path) == resolved(loaded("optim.lr=1e-5", "training.seed=3"))
    assert load_yaml(path)["optim"]["lr"] == 1e-5


def test_options_reach_the_training_keys_that_the_defaults_leave_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(Short, argv=["--print_config", "training.seed=3"])
    printed = capsys.readouterr().out
    assert "seed: 3" in printed
    assert "log_interval: 10" in printed


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            ["--output", ""],
            "--output: '' given; expected the directory of the run, or no",
        ),
        (["--output", "x", "training.sed=1"], "unknown key 'training.sed'. Did you mean"),
        (["--config", "no.yaml"], "no.yaml: cannot be read"),
        (
            ["--output", "runs/{optim.rl}"],
            "--output: 'runs/{optim.rl}' names no config value: no key 'rl' here. There are: lr",
        ),
    ],
)
def test_a_mistake_is_answered_with_one_line_and_code_78(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = default_argument_parser()
    parser.prog = "train.py"
    with pytest.raises(SystemExit) as caught:
        main(Demo, parser=parser, argv=words)
    assert caught.value.code == 78
    text = capsys.readouterr().err
    assert text == f"{caught.value}\n"
    assert text.startswith("train.py: error: ")
    assert answer in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--max_iteration 5", "training.max_iteration=5"),
        ("--output=x --max-iteration=5 training.seed=3", "training.max_iteration=5"),
        ("--optim.lr 1e-3", "optim.lr=1e-3"),
        ("--lr", "optim.lr="),
    ],
)
def test_a_config_value_that_is_given_as_an_option_is_answered_with_how_it_is_given(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(Demo, argv=words.split())
    assert caught.value.code == 78
    assert capsys.readouterr().err.endswith(f". Did you mean {meant}?\n")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--ouptut=x", "Did you mean --output?"),
        ("--chekpoint_path x", "Did you mean --checkpoint_path?"),
        ("--smok", "Did you mean --smoke?"),  # and no trial begins
        ("--epochs 5", "Did you mean training.max_epoch=5?"),
        (
            "--zzz",
            "--help names the options; a value of your own is a key of default_config: KEY=VALUE.",
        ),
    ],
)
def test_a_mistyped_option_is_answered_with_the_nearest_one_in_one_line(
    words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(Demo, argv=words.split())
    assert caught.value.code == 78
    error = capsys.readouterr().err
    assert error.endswith(f"error: unrecognized arguments: {words.split()[0]}. {hint}\n")
    assert error.count("\n") == 1


def test_what_another_start_may_mend_is_no_mistake() -> None:
    unwritten = CheckpointError("step-1: cannot be written")
    unwritten.__cause__ = OSError(28, "No space left")
    with pytest.raises(SystemExit) as caught, report_user_errors("train.py"):
        raise unwritten
    assert caught.value.code == 1


@pytest.mark.parametrize("number", ["0", "1.5"])
def test_a_number_of_processes_below_one_is_wrong_usage(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(f"--nprocs={number}")
    assert caught.value.code == 78
    assert f"--nprocs: {number!r} given; expected 1 or more" in capsys.readouterr().err


def test_auto_needs_shares_without_which_the_bits_would_be_those_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(Tiny, argv=["--output", str(tmp_path / "run"), "--nprocs", "auto"])
    assert caught.value.code == 78
    text = "--nprocs: auto given; expected a number, or training.shares, too."
    assert text in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_without_an_output_a_run_is_in_a_directory_that_the_class_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--device=cpu", "training.max_iteration=2"]
    exp = main(Tiny, argv=words)
    assert exp.args.output == "runs/Tiny"
    assert exp.output_dir == tmp_path / "runs/Tiny"
    main(Tiny, argv=words)
    assert "FINISHED already" in (exp.output_dir / "worker_0.log").read_text()
    main(Tiny, argv=["--device=cpu", "--evaluate=last"])
    assert json.loads(capsys.readouterr().out)["iteration"] == 2
    with pytest.raises(SystemExit, match="runs/Tiny' holds a run of another config"):
        main(Tiny, argv=[*words, "training.seed=1"])


def test_config_values_fill_the_output_path() -> None:
    config = Demo.default_config()
    filled = fill_in("runs/lr{optim.lr:.0e}-{training.seed}", config)
    assert filled == "runs/lr1e-01-0"
    for unknown in ("{}", "{lr}", "{optim.rl}"):
        with pytest.raises(ConfigError, match="names no config value") as caught:
            fill_in(f"runs/{unknown}", config)
        assert unknown in str(caught.value)
        assert re.search(r"optim\.lr|There are: lr, momentum, name\.$", str(caught.value))


def test_a_section_or_a_form_that_does_not_fit_is_no_part_of_the_output_path() -> None:
    config = Demo.default_config()
    with pytest.raises(ConfigError) as caught:
        fill_in("runs/{optim}", config)
    assert str(caught.value) == (
        "--output: 'runs/{optim}': optim is a section; expected one of its keys: {optim.lr}, "
        "{optim.momentum}, {optim.name}."
    )
    text = "'zz' given as the form of optim.lr, 0.1: .*; expected {optim.lr}, or one of Python's"
    with pytest.raises(ConfigError, match=text):
        fill_in("runs/{optim.lr:zz}", config)
    assert fill_in("runs/{optim!r:.4}", config) == "runs/Conf"  # who asks for its text has it


def test_a_users_parser_may_have_options_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    parser = default_argument_parser()
    parser.add_argument("--note")
    main(Demo, parser=parser, argv=["--note", "x", "--print_config"])
    assert "optim:" in capsys.readouterr().out


def test_a_class_of_a_notebook_is_not_given_to_new_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cell(Demo): ...

    monkeypatch.setattr(sys, "argv", ["/lib/ipykernel_launcher.py", "-f", "/run/kernel-1.json"])
    Cell.__module__ = "__main__"
    for words in (["--nprocs", "2"], ["--restarts", "1"]):
        with pytest.raises(SystemExit, match=r"%%writefile train\.py, and from train import Cell"):
            main(Cell, argv=["--output", "run", *words])


def test_a_default_config_that_is_no_classmethod_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Forgot(Demo):
        def default_config(self) -> Config:  # type: ignore[override]
            return super().default_config()

    class Value(Demo):
        default_config = Config({"training": {}})  # type: ignore[assignment]

    class Mixed(Forgot):
        @classmethod
        def default_config(cls) -> Config:
            return super().default_config()

    for experiment, name in ((Forgot, "Forgot"), (Value, "Value"), (Mixed, "Forgot")):
        answer = (
            f"{name}.default_config: cannot be called on the class, before there is "
            "an experiment; expected @classmethod above `def default_config(cls):`."
        )
        with pytest.raises(SystemExit, match="default_config"):
            main(experiment, argv=["--output", "run"])
        assert capsys.readouterr().err.endswith(f"error: {answer}\n")
        with pytest.raises(ConfigError, match="expected @classmethod"):
            experiment(Demo.default_config(), parsed("--output", "run"))


def test_words_in_one_text_are_named() -> None:
    with pytest.raises(SystemExit, match=r"expected a list of words: argv=\['--output', 'x'\]\."):
        main(Demo, argv="--output x")  # type: ignore[arg-type]


@pytest.mark.parametrize("program", ["ipykernel_launcher.py", "colab_kernel_launcher.py"])
def test_main_without_words_in_a_notebook_says_how_they_are_given(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/lib/{program}", "-f", "/run/kernel-1.json"])
    with pytest.raises(SystemExit, match="main: called in a notebook"):
        main(Demo)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "expected main(Demo, argv=['--output', 'runs/NAME'])." in told
    with pytest.raises(SystemExit):
        default_argument_parser().parse_args()
    assert "sys.argv is the kernel's; expected parse_args([" in capsys.readouterr().err
    main(Demo, argv=["--print_config"])
    assert parsed("--output", "run").output == "run"


# --- mixins in front -------------------------------------------------------------------------


class Outer(ExperimentBase):
    """What a tool puts in front."""

    def setup(self) -> None:
        print("outer")
        super().setup()


class Inner(ExperimentBase):
    """Another one."""

    def setup(self) -> None:
        print("inner")
        super().setup()


class Silent(Demo):
    """One without the four methods' work; its setup and run end at once."""

    setup_dataloader = setup_model = train_batch = valid = lambda self: None

    def setup(self) -> None:
        print(type(self).__name__, type(self).__module__ == __name__)

    def run(self) -> None:
        print("run")


def test_main_runs_the_class_with_the_mixins_in_front_and_only_in_their_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with put_in_front(Inner), put_in_front(Outer):
        main(Silent, argv=["--output", "run"])
    assert capsys.readouterr().out.split() == ["outer", "inner", "Silent", "True", "run"]
    with pytest.raises(KeyError), put_in_front(Outer):
        raise KeyError
    assert type(Silent(Silent.default_config(), parsed("--output", "run"))) is Silent


def test_the_processes_of_nprocs_have_the_mixins_in_front(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(mixins_in_front, "_mixins", [])

    def spawn(function: Any, args: Any, *_: Any) -> launch.Outcome:
        started.append(pickle.dumps((function, args)))  # a process is given no more than this
        return launch.Outcome(7)

    monkeypatch.setattr(launch, "spawn", spawn)
    with pytest.raises(SystemExit, match="7"), put_in_front(Outer):
        main(Silent, argv=["--output", "run", "--nprocs", "2"])
    assert capsys.readouterr().out == ""
    function, args = pickle.loads(started[0])
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    function(*args)
    assert capsys.readouterr().out.split() == ["outer", "Silent", "True", "run"]


@pytest.mark.parametrize(
    ("words", "use", "is_its_fault"),
    [
        (["--smoke"], lambda args: Path(args.data) / "train", True),
        (["--output", "run"], lambda args: open(args.data), True),
        (["--output", "run"], lambda args: open(f"{args.data}/train"), True),
        (["--output", "run"], lambda args: args.data.split(), True),
        (["--output", "run"], lambda args: Path(None), False),  # it was not read
        (["--output", "run"], lambda args: args.data or [][0], False),  # one may do without
    ],
)
def test_an_error_that_may_come_of_no_data_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    use: Callable[[Any], Any],
    is_its_fault: bool,
) -> None:
    class Reading(Tiny):
        def setup_dataloader(self) -> None:
            use(self.args)

    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, OSError, AttributeError, IndexError)) as caught:
        main(Reading, argv=[*words, "--device=cpu"])
    text = "".join(traceback.format_exception(caught.value))
    assert ("--data was not given, so self.args.data" in text) == is_its_fault


@pytest.mark.parametrize("option", ["--nprocs=2", "--restarts=1"])
def test_processes_are_refused_in_a_thread_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """Python lets its main thread alone handle signals, which are passed on to them."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    words = ["--output", str(tmp_path / "run"), option, "--fresh"]
    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(main, Silent, argv=words).exception()
    assert isinstance(error, SystemExit)
    assert error.code == 78
    said = capsys.readouterr().err
    assert "--nprocs or --restarts: given to main() in a thread; expected it in the main" in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "config.yaml"]


def test_sigterm_is_answered_from_the_moment_when_main_runs(tmp_path: Path) -> None:
    class Early(Tiny):
        @classmethod
        def default_config(cls) -> Config:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().default_config()

    with pytest.raises(SystemExit) as ended:
        main(Early, argv=["--output", str(tmp_path), "--restarts", "2"])
    assert ended.value.code == 143
    assert not [*tmp_path.iterdir()]


def test_restarts_are_refused_where_they_would_do_harm_or_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output", "run", "--restarts", "2"]
    args = parsed("--output", "run", "--evaluate", "best")
    args.restarts = 2
    with pytest.raises(ConfigError, match="--restarts: given with --evaluate or --export"):
        Silent(Silent.default_config(), args)
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    with pytest.raises(SystemExit, match="expected the launcher's own --max_restart"):
        main(Demo, argv=words)
    main(Demo, argv=[*words, "--print_config"])
    assert "max_iteration" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="78"):
        main(Demo, argv=["--restarts=-1"])
    assert "--restarts: '-1' given; expected 0 or more" in capsys.readouterr().err


def test_a_tool_in_front_sees_the_failure_and_no_restart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with put_in_front(Outer):
        main(Silent, argv=["--output", "run", "--restarts", "2"])
    assert capsys.readouterr().out.split() == ["outer", "Silent", "True", "run"]


@pytest.mark.parametrize("error", [ConfigError("wrong"), CheckpointError("wrong")])
def test_a_users_mistake_is_one_line_on_rank_0_and_a_bare_code_on_the_others(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, text in ((0, "train.py: error: wrong\n"), (1, "")):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        with pytest.raises(SystemExit) as caught, report_user_errors("train.py"):
            raise error
        assert caught.value.code == 78
        assert capsys.readouterr().err == text

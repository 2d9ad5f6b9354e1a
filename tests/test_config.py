"""The config: its defaults, what a person may write into it, and what is answered to a mistake."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import re
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np
import pytest
from tiny import Tiny, trained

from expbase import Config, ConfigError, default_argument_parser, get_default_training_config
from expbase import config as config_module
from expbase.cli import load_config
from expbase.config import adopt, differences, dump_yaml, fill, flatten, load_yaml
from expbase.extras.mixins import ExponentialMovingAverage
from expbase.training import TrainingKeys, as_given, check_training, resolved

DEFAULTS = {
    "max_iteration": 0, "max_epoch": 0,
    "valid_interval": None, "save_interval": None, "log_interval": 10,
    "valid_every_epoch": 0, "save_every_epoch": 0, "save_seconds": 0,
    "accumulation_steps": 1, "shares": 0, "skip_updates": [],
    "seed": 0, "deterministic": False,
    "keep_last": 3, "keep_every": 0, "keep_best": 1, "monitor": "", "monitor_mode": "max",
    "time_limit_seconds": 0, "hang_seconds": 600, "hang_action": "report",
    "nonfinite": "error",
}  # fmt: skip
TRIGGERS = {"max_iteration": 4, "valid_interval": 2, "save_interval": 2}
# Texts that YAML, or a reader in a hurry, takes for something else.
TRICKY = ["", "a: b", *"1e5 1.5 012 0x1F 12:30 1_000 true off null ~ [1] nan 2024-01-01 é".split()]
TRICKY += "08 00 +1 -.5 .inf -.INF .nan 1. 1_000e5 1.5e3 0o17 0b1 2020_01 NO y << 1:30.5".split()


def defaults() -> Config:
    config = Config({"optim": {"lr": 0.1, "name": "adam", "betas": [0.9, 0.99]}, "augment": {}})
    config.training = get_default_training_config()
    return config


def from_file(tmp_path: Path, text: str) -> Config:
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    config = defaults()
    config.merge_from_file(tmp_path / "c.yaml")
    return config


def from_options(*words: str) -> Config:
    config = defaults()
    config.merge_from_list(words)
    return config


def complete(config: Any) -> Config:
    completed = fill(config)
    check_training(completed.training)
    return completed


def complaint(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except ConfigError as error:
        return str(error)
    pytest.fail(f"no complaint about {args}")


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("optim.lr", "1", 1.0),
        ("optim.lr", "1e-3", 0.001),
        ("training.valid_interval", "1e5", 100000),
        ("training.save_interval", "null", None),
        ("training.deterministic", "False", False),
    ],
)
def test_numbers_are_taken_as_a_person_means_them(
    tmp_path: Path, key: str, written: str, meant: Any
) -> None:
    section, name = key.split(".")
    for config in (
        from_file(tmp_path, f"{section}:\n  {name}: {written}\n"),
        from_options(key, written),
        from_options(f"{key}={written}"),
    ):
        value = config[section][name]
        assert (value, type(value)) == (meant, type(meant))


def test_a_text_that_looks_like_something_else_stays_a_text(tmp_path: Path) -> None:
    for text in TRICKY:
        config = from_options("optim.name", text)
        assert config.optim.name == text
        assert from_file(tmp_path, dump_yaml(config)).optim.name == text


def changed(tmp_path: Path, default: Any, text: str) -> list[Any]:
    """What the text makes of a default, in a file and in an option."""
    of_file, of_option = (Config({"a": {"b": default}}) for _ in range(2))
    (tmp_path / "c.yaml").write_text(f"a:\n  b: {text}\n")
    of_file.merge_from_file(tmp_path / "c.yaml")
    of_option.merge_from_list([f"a.b={text}"])
    return [of_file.a.b, of_option.a.b]


def test_a_text_of_a_list_or_of_an_open_section_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in TRICKY:
        config = Config({"list": [text, {"a": [text]}], "any": None, "open": {}})
        config.any = config.open.text = text
        path.write_text(dump_yaml(config))
        assert load_yaml(path) == config


AS_THE_DEFAULT: list[tuple[Any, str, Any]] = [
    *[(1, "010", 10), (1, "0x10", 16), (1, "1_000", 1000), (1, "+1", 1), (1, "1.", 1)],
    *[(1.0, "010", 10.0), (1.0, ".5", 0.5), (1.0, ".inf", math.inf), (1.0, "-.INF", -math.inf)],
    *[(False, "yes", True), (False, "on", True), (True, "OFF", False), (True, "no", False)],
    *[("x", text, text) for text in "010 1:30 on no true 1.50 1e5 2020-01-01 0x10".split()],
    *[(None, text, text) for text in "010 1:30 2020-01-01 2020-13-45 2020_01 0o17".split()],
    *[(None, "1_000", 1000), (None, "0x10", 16), (None, "1e3", 1000.0), (None, "yes", True)],
    (["00", "01"], "[00, 01, 10]", ["00", "01", "10"]),
    (["00"], "[08, 09, 1:30, on, 1.0]", ["08", "09", "1:30", "on", "1.0"]),
    ([30, 60], "[3e1, 060, 0x10]", [30, 60, 16]),
    ([0.9, 0.99], "[1, .5, 1e-3]", [1.0, 0.5, 0.001]),
    ([1, 0.5], "[2, 1.5]", [2, 1.5]),
    ([True], "[yes, false]", [True, False]),
    ((1, 2), "(3, 4, 5)", (3, 4, 5)),
    ([(1, 2)], "[[3, 4]]", [(3, 4)]),
    ([["00"], ["01"]], "[[010], [1, 2]]", [["010"], ["1", "2"]]),
    (["crop", 4], "[010, 010]", ["010", 10]),
    ([("conv", 3), ("pool", 2)], "[[1, 1e1]]", [("1", 10)]),
    ([{"name": "a", "at": (1,)}], "[{name: 01, at: [1e1], p: 2}]",
     [{"name": "01", "at": (10,), "p": 2}]),
    ([], "[08, 09, 10, x]", ["08", "09", "10", "x"]),
    ([], "[1, 1.5, yes, [010]]", [1, 1.5, True, ["010"]]),
]  # fmt: skip
NOT_AS_THE_DEFAULT = [
    (1, "1:30", "a.b: '1:30' given; expected a whole number like 1"),
    (1.0, "1:30.5", "expected a number like 1.0"),
    (1.0, "2020-01-01", "expected a number like 1.0"),
    (1, "yes", "a.b: True given; expected a whole number like 1"),
    ([30, 60], "[30, x]", "a.b: [30, 'x'] given; expected a list like [30, 60]"),
    ([30], "[1:30]", "a.b: ['1:30'] given; expected a list like [30]"),
    ([30], "[1.5]", "a.b: [1.5] given; expected a list like [30]"),
    ([1, 0.5], "[x, 1]", "expected a list like [1, 0.5]"),
    (["a"], "[[b]]", "a.b: [['b']] given; expected a list like ['a']"),
    (None, "!!timestamp 2020-01-01", "expected a number, a text, true or false, None, a list"),
    (None, "!!binary aGk=", "a.b: b'hi' given; expected a number, a text, true or false"),
    ([], "[!!set {a}]", "a.b: [{'a'}] given; expected a list like []"),
]


def test_what_is_written_is_read_as_the_default_is(tmp_path: Path) -> None:
    for default, text, meant in AS_THE_DEFAULT:
        for value in changed(tmp_path, default, text):
            assert repr(value) == repr(meant), (default, text)


def test_what_is_not_as_the_default_is_named(tmp_path: Path) -> None:
    for default, text, answer in NOT_AS_THE_DEFAULT:
        assert answer in complaint(changed, tmp_path, default, text)


def test_keys_are_texts_as_they_are_written_and_find_numbers(tmp_path: Path) -> None:
    config = Config({"names": {0: "zero", 1: {"b": 1}}, "open": {}})
    config.merge_from_list(["names.0=none", "names.1.b=2"])
    assert config.names == {0: "none", 1: {"b": 2}}
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    config.merge_from_file(path)
    assert config.names == {0: "none", 1: {"b": 2}}
    path.write_text("names: {0: nil}\nopen: {010: a, on: b, 1:30: c}\n")
    config.merge_from_file(path)
    assert config.names[0] == "nil"
    assert config.open == {"010": "a", "on": "b", "1:30": "c"}


@pytest.mark.parametrize(
    "make",
    [
        lambda value: Config({"a": {"b": value}}),
        lambda value: setattr(Config({"a": {}}).a, "b", value),
        lambda value: Config({"a": {"b": [1, (value,)]}}),
        lambda value: dump_yaml({"a": {"b": value}}),
    ],
)
def test_a_value_that_no_file_can_hold_is_named_where_it_is_set(make: Any) -> None:
    for value in (Path("x"), np.float64(0.1), {1}):
        answer = complaint(make, value)
        assert f"{value!r} is a {type(value).__name__}; expected a number, a text" in answer
        assert re.match(r"config: (a\.)?b(\[1\]\[0\])?: ", answer)


def test_what_is_no_mapping_makes_no_config() -> None:
    assert complaint(lambda: Config(size=20, lr=0.1)) == (
        "Config(size=20, lr=0.1): expected a mapping: Config({'size': 20, 'lr': 0.1})."
    )
    assert "A file is read by merge_from_file" in complaint(Config, "config.yaml")


@pytest.mark.parametrize("key", ["BASE", "_base_"])
def test_a_file_that_builds_on_others_is_answered_with_the_options_that_do(
    tmp_path: Path, key: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"optim: {{lr: 1}}\n{key}: ['../base.yml', sgd.yml]\n")
    assert complaint(defaults().merge_from_file, path).endswith(
        f"a later one wins: --config {tmp_path}/../base.yml --config {tmp_path}/sgd.yml "
        f"--config {path}."
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("optim.lr", "fast", "expected a number like 0.1"),
        ("optim.lr", True, "expected a number like 0.1"),
        ("training.seed", 1.5, "expected a whole number like 0"),
        ("training.deterministic", 1, "expected true or false, like False"),
        ("optim.name", [7], "expected a text like 'adam'"),
        ("optim.betas", 3, "expected a list like [0.9, 0.99]"),
        ("optim", 3, "expected a section with lr, name, betas"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_was_expected(
    tmp_path: Path, key: str, value: Any, expected: str
) -> None:
    *sections, name = key.split(".")
    tree: dict[str, Any] = {name: value}
    for section in sections:
        tree = {section: tree}
    text = complaint(from_file, tmp_path, dump_yaml(tree))
    assert f"c.yaml: {key}: {value!r} given; {expected}" in text


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("training.max_iteraton", "training.max_iteration"),
        ("optim.lrr", "optim.lr"),
        ("lr", "optim.lr"),
    ],
)
def test_a_misspelt_key_is_answered_with_the_nearest_name(
    tmp_path: Path, option: str, near: str
) -> None:
    *section, name = option.split(".")
    lines = f"{section[0]}:\n  {name}: 1\n" if section else f"{name}: 1\n"
    for text in (
        complaint(from_options, f"{option}=1"),
        complaint(from_options, option, "1"),
        complaint(from_file, tmp_path, lines),
    ):
        assert f"unknown key {option!r}. Did you mean {near!r}?" in text


def test_a_misspelt_section_is_answered_with_the_right_one() -> None:
    text = complaint(from_options, "trainig.max_epoch=1")
    assert re.search(r"'trainig(\.max_epoch)?'\. Did you mean 'training(\.max_epoch)?'\?", text)


def test_a_section_of_a_mixin_that_is_not_there_names_the_mixin() -> None:
    text = complaint(from_options, "early_stopping.patience=3")
    assert "'early_stopping.patience'. The mixin EarlyStopping has it: `from expbase.extras" in text


def test_a_mistyped_key_of_a_mixin_that_is_there_is_named() -> None:
    class Averaged(ExponentialMovingAverage, Tiny): ...

    with pytest.raises(ConfigError, match=r"key 'ema\.deacy'\. Did you mean 'ema\.decay'\?"):
        load_config(Averaged, default_argument_parser().parse_args(["ema.deacy=0.9"]))


def test_a_key_like_no_other_is_answered_with_all_names() -> None:
    text = complaint(from_options, "zzz=1")
    assert "unknown key 'zzz'. Expected one of" in text
    assert "optim.lr" in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["optim.lr"], "'optim.lr' has no value; expected KEY VALUE or KEY=VALUE"),
        (["optim.lr", "=", "5"], "optim.lr = …: expected optim.lr=VALUE, without spaces"),
        (["optim.lr＝1"], "'optim.lr＝1' has a full-width ＝; expected KEY=VALUE"),
        (["b.yaml", "optim.lr=1"], "'b.yaml' is a file; expected --config b.yaml for each file"),
        (["optim.betas=[1"], "optim.betas: '[1': not YAML"),
        (["optim.lr=2020-13-45"], "optim.lr: '2020-13-45' given; expected a number like 0.1"),
    ],
)
def test_an_option_that_cannot_be_read_is_named(words: list[str], part: str) -> None:
    assert f"options: {part}" in complaint(from_options, *words)


def test_a_failed_change_leaves_the_config_as_it_was(tmp_path: Path) -> None:
    config = defaults()
    for call in (
        lambda: config.merge_from_list(["optim.lr=0.5", "optim.nope=1"]),
        lambda: config.merge_from_other_cfg({"optim": {"lr": 0.5}, "training": {"seed": "x"}}),
    ):
        complaint(call)
        assert config == defaults()


def test_a_section_with_nothing_under_it_changes_nothing(tmp_path: Path) -> None:
    for text in ("optim:\n", "optim: {}\ntraining:\n"):
        assert from_file(tmp_path, text) == defaults(), text


def test_an_open_section_takes_any_keys_again_and_again(tmp_path: Path) -> None:
    config = from_file(tmp_path, "augment:\n  flip: true\n  crop: {size: 1e2}\n")
    config.merge_from_list(["augment.noise=0.1", "augment.blur.sigma=2"])
    assert (config.augment.flip, config.augment.noise) == (True, 0.1)
    assert (config.augment.crop.size, config.augment.blur.sigma) == (100.0, 2)
    assert from_file(tmp_path, dump_yaml(config)) == config
    assert "augment.flip" in complaint(config.merge_from_list, ["augment.flip=maybe"])


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("c.py", b"import os", "holds no mapping"),
        ("c.yaml", b"- 1\n- 2\n", "holds no mapping; expected `key: value` lines"),
        ("c.yaml", b"a: [1\n", "not YAML"),
        ("c.yaml", b"a: \xff\n", "expected a file that was saved as UTF-8"),
        ("c.yaml", "a:\n  lr：3\n b: 1\n".encode(), "Expected `lr: `, with a colon of ASCII"),
        ("c.yaml", None, "cannot be read"),
        ("c.yaml", b"a: !!python/object/apply:os.getcwd []\n", "not YAML"),
        ("c.yaml", b"training: {seed: 1}\ntraining: {max_epoch: 2}\n", "'training'"),
    ],
)
def test_a_file_that_is_no_config_is_named_with_the_reason(
    tmp_path: Path, name: str, content: bytes | None, part: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    text = complaint(load_yaml, path)
    assert text.startswith(f"{path}: ")
    assert part in text


def test_three_triggers_are_enough_and_the_rest_is_filled_in_a_copy() -> None:
    given = {"training": {**TRIGGERS, "max_iteration": 1e2, "warmup": 7}, "optim": {"lr": 0.1}}
    completed = complete(given)
    assert completed.training == {**DEFAULTS, **TRIGGERS, "max_iteration": 100, "warmup": 7}
    completed.optim.lr = 5.0
    assert given["optim"] == {"lr": 0.1}
    assert len(given["training"]) == 4


OF_NO_USE: list[tuple[dict[str, Any] | None, str]] = [
    (None, "training.max_iteration is missing; expected a section `training` with"),
    *[
        ({k: v for k, v in TRIGGERS.items() if k != missing}, f"training.{missing} is missing")
        for missing in TRIGGERS
    ],
    ({**TRIGGERS, "log_intervall": 1}, "'log_intervall'. Did you mean 'log_interval'?"),
    ({**TRIGGERS, "seed": "x"}, "training.seed: 'x' given; expected a whole number"),
    ({**TRIGGERS, "seed": math.inf}, "training.seed: inf given; expected a whole number"),
    ({**TRIGGERS, "save_interval": -1}, "training.save_interval: -1 given; expected 0 or"),
    ({**TRIGGERS, "accumulation_steps": 0}, "training.accumulation_steps: 0 given; expected 1"),
    ({**TRIGGERS, "shares": 6}, "training.shares: 6 given; expected a power of two"),
    *[
        ({**TRIGGERS, "skip_updates": given}, f"training.skip_updates: {given!r} given;")
        for given in (4017, None, "all", ["all"], [0], [7, -1], [1.5], [True], [[4]])
    ],
    (
        {**TRIGGERS, "shares": 4, "accumulation_steps": 2},
        "training.accumulation_steps: expected 1",
    ),
    ({**TRIGGERS, "monitor_mode": "best"}, "monitor_mode: 'best' given; expected one of 'max'"),
    ({**TRIGGERS, "nonfinite": "stop"}, "nonfinite: 'stop' given; expected one of 'error'"),
]


def test_a_training_section_that_is_of_no_use_is_refused() -> None:
    for training, part in OF_NO_USE:
        assert part in complaint(complete, {"training": training} if training else {})


def test_a_key_of_ones_own_is_legal_unless_it_is_all_but_one_of_ours() -> None:
    own = {"plot_interval": 1, "grad_accumulation_steps": 3, "warmup": 4}
    assert complete({"training": {**TRIGGERS, **own}}).training.plot_interval == 1
    for typo in ("save_intervall", "max_iterations", "max_epochs", "max_epcoh", "eval_interval"):
        text = complaint(complete, {"training": {**TRIGGERS, typo: 1}})
        assert f"unknown key {typo!r}. Did you mean" in text


def test_a_key_with_a_dot_is_one_in_a_section(tmp_path: Path) -> None:
    config = from_file(tmp_path, "optim.lr: 1\naugment.crop.size: 2\n")
    assert (config.optim.lr, config.augment.crop.size) == (1.0, 2)
    assert "unknown key 'optim.betas.a'" in complaint(from_options, "optim.betas.a=1")


# What is given; then both limits, and for valid and save the interval and the number of epochs.
FOLLOWING: list[tuple[Any, ...]] = [
    ({}, (10000, 0), (1000, 0), (1000, 0)),
    ({"max_iteration": 7}, (7, 0), (1000, 0), (1000, 0)),
    # By epochs alone: once per epoch, each that is not given otherwise.
    ({"max_epoch": 60}, (0, 60), (0, 1), (0, 1)),
    ({"max_epoch": 60, "valid_interval": 1000}, (0, 60), (1000, 0), (0, 1)),
    ({"max_epoch": 60, "save_interval": 0}, (0, 60), (0, 1), (0, 0)),
    ({"max_epoch": 60, "save_every_epoch": 5}, (0, 60), (0, 1), (0, 5)),
    ({"max_epoch": 60, "max_iteration": 7}, (7, 60), (0, 1), (0, 1)),
    # A number of epochs that is given is no addition to a default.
    ({"max_iteration": 7, "valid_every_epoch": 2}, (7, 0), (0, 2), (1000, 0)),
    ({"valid_every_epoch": 2, "valid_interval": 9}, (10000, 0), (9, 2), (1000, 0)),
]


def test_what_is_not_given_follows_from_how_training_ends() -> None:
    for given, *expected in FOLLOWING:
        config = defaults()
        config.training.update(given)
        found = resolved(config).training
        limits = found.max_iteration, found.max_epoch
        valid = found.valid_interval, found.valid_every_epoch
        save = found.save_interval, found.save_every_epoch
        assert [limits, valid, save] == expected, given
        assert resolved(resolved(config)) == resolved(config)
        assert as_given(resolved(config), defaults()) == config


def test_updates_to_leave_out_are_whole_numbers_in_a_list() -> None:
    for written in ("training.skip_updates=[4017, 1e3]", "training.skip_updates=(4017,1000.0)"):
        assert from_options(written).training.skip_updates == [4017, 1000]
    config = from_options("training.skip_updates=[4017]", "training.skip_updates=[]")
    assert config.training.skip_updates == []
    text = "options: training.skip_updates: 4017 given; expected a list like [4017]."
    assert complaint(from_options, "training.skip_updates=4017") == text
    training = get_default_training_config()
    training.skip_updates.append(3)
    assert get_default_training_config() == DEFAULTS  # each has a list of its own
    for given in (0, 4017, [0], ["3"], [True]):
        training.skip_updates = given
        text = f"training.skip_updates: {given!r} given; expected a list of whole numbers, each 1 "
        assert text in complaint(check_training, resolved(Config({"training": training})).training)


def test_an_interval_of_another_type_is_refused_where_it_is_written() -> None:
    text = "options: training.valid_interval: 'often' given; expected a whole number like 1000."
    assert complaint(from_options, "training.valid_interval=often") == text


def test_a_limit_of_epochs_is_enough() -> None:
    for given in ({"max_epoch": 2}, {"max_epoch": 2, "valid_interval": 2}):
        assert complete({"training": given}).training == {**DEFAULTS, **given}


def test_the_types_of_the_keys_are_those_of_their_defaults() -> None:
    types = get_type_hints(TrainingKeys)
    assert {*DEFAULTS} == {*types}
    assert get_default_training_config() == DEFAULTS
    for key, default in get_default_training_config().items():
        kind = get_origin(types[key]) or types[key]
        assert kind is (int if default is None else type(default)), key
        assert not hasattr(TrainingKeys, key)  # it would hide the item


def test_differences_name_full_keys_with_both_values() -> None:
    old, new = Config({"a": {"b": 1, "c": 2}, "d": 3}), Config({"a": {"b": 1, "c": 5, "e": None}})
    assert differences(old, new) == {"a.c": (2, 5), "d": (3, None)}
    assert flatten(old) == {"a.b": 1, "a.c": 2, "d": 3}


def test_a_config_read_back_does_not_differ_from_itself(tmp_path: Path) -> None:
    config = Config({"steps": ((1, 2), (3, 4)), "fill": math.nan, "x": 1e-7, "open": {}})
    (tmp_path / "c.yaml").write_text(dump_yaml(config))
    assert differences(load_yaml(tmp_path / "c.yaml"), config) == {}
    again = config.clone()
    again.merge_from_file(tmp_path / "c.yaml")  # as --evaluate and --export do
    assert repr(again) == repr(config)


@pytest.mark.parametrize(
    "value",
    [
        [Config({"lr": 0.1, "on": (1, 2)}), Config({"lr": 0.2, "on": (3,)})],
        [[Config({"lr": 0.1})], [Config({"lr": 0.2})]],
        (Config({"x": 1}),),
        [Config({"x": 1}), Config({"y": (1, 2)})],
        [{"x": Config({"y": 1})}],
        [Config({"x": "None"}), Config({"x": None})],
        [{"x": 1}],
        "None",
        ["None", "batch"],
        Config({"conv1.weight": 0.5, "conv1.weight.ema": (0.9,), "7": {"a.b": 1}}),
        Config({1: "x", 2: Config({"1.5": 2})}),
    ],
    ids=repr,
)
def test_what_a_default_holds_comes_back_from_the_file_of_a_run(tmp_path: Path, value: Any) -> None:
    config = Config({"value": value, "other": 1})
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    again = config.clone()
    again.merge_from_file(tmp_path / "config.yaml")
    assert repr(again) == repr(config)


def test_a_key_with_a_dot_is_given_as_it_is_written(tmp_path: Path) -> None:
    config = Config({"rates": {"conv1.weight": 0.5}})
    config.merge_from_list(["rates.conv1.weight=2"])
    assert config.rates == {"conv1.weight": 2.0}
    with pytest.raises(ConfigError, match=r"unknown key 'rates\.conv1\.bias'"):
        config.merge_from_list(["rates.conv1.bias=2"])


@pytest.mark.long
def test_the_file_of_a_run_may_be_long_and_one_that_was_named_by_mistake_may_not(
    tmp_path: Path,
) -> None:
    config = Config({"files": [f"/data/{i:06}/{'x' * 20}.jpg" for i in range(30_000)]})
    for name in "config.yaml", "c.yaml":
        (tmp_path / name).write_text(dump_yaml(config))
    assert (tmp_path / "c.yaml").stat().st_size > 1 << 20
    again = config.clone()
    again.files = again.files[:3]
    again.merge_from_file(tmp_path / "config.yaml")
    assert again == config
    assert "expected at most 1048576" in complaint(load_yaml, tmp_path / "c.yaml")


def test_many_items_are_not_each_compared_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    converted = config_module._converted
    monkeypatch.setattr(
        config_module, "_converted",
        lambda value, examples: [given.append(len(examples)), converted(value, examples)][1],
    )  # fmt: skip
    pairs = [["a.jpg", 1], ["b.jpg", 2]] * 500
    config = Config({"pairs": pairs})
    config.merge_from_other_cfg({"pairs": pairs})
    assert (len(given), max(given)) == (1 + 3 * 1000, 1)


def test_keys_that_a_config_lacks_are_taken_from_a_run_and_no_others() -> None:
    config = Config({"a": {"b": 1, "text": "x"}, "open": {}, "none": None, "n": 2})
    of_run = {
        "a": {"b": 5, "old": (1, 2), "part": {"x": 1, "y": {"z": 2}}}, "gone": [3],
        "open": {"k": 1}, "none": {"k": 2}, "n": {"deep": 4},
    }  # fmt: skip
    added = {"a.old": (1, 2), "a.part.x": 1, "a.part.y.z": 2, "gone": [3]}
    flat = Config(config.clone())
    assert adopt(config, of_run) == added
    assert config.a == {"b": 1, "text": "x", "old": (1, 2), "part": {"x": 1, "y": {"z": 2}}}
    assert (config.gone, config.open, config.none, config.n) == ([3], {}, None, 2)
    assert isinstance(config.a.part.y, Config)
    assert adopt(flat, flatten(of_run)) == added
    assert flat == config


def test_a_config_in_the_place_of_yacs_reads_what_yacs_reads(tmp_path: Path) -> None:
    config = Config({"norm": "batch", "init": None, "sizes": (1, 2), "list": [1], "S": {"N": 4}})
    (tmp_path / "old.yaml").write_text(
        "norm: None\ninit: 'None'\nsizes: (1, 2, 3, 4)\nlist: '[5]'\n"
    )
    config.merge_from_file(tmp_path / "old.yaml")
    assert (config.norm, config.init) == (None, None)
    assert (config.sizes, config.list) == ((1, 2, 3, 4), [5])
    config.merge_from_list(["S.N", 8, "norm", "layer", "sizes", (7, 8), "init", "None"])
    assert (config.S.N, config.norm, config.sizes, config.init) == (8, "layer", (7, 8), None)
    for words in (["S.N", "None"], ["sizes", "(1, 2"], ["sizes", "1"], [8, 8]):
        with pytest.raises(ConfigError, match="options: "):
            config.merge_from_list(words)


@pytest.mark.parametrize("key", ["sanity_batches", "overfit_batches"])
def test_a_key_that_is_gone_says_what_to_do_instead(key: str) -> None:
    text = rf"training\.{key}'? is gone|training\.{key}: this key is gone"
    with pytest.raises(ConfigError, match=text):
        complete({"training": {**TRIGGERS, key: 2}})
    with pytest.raises(ConfigError, match=text):
        complete({"training": TRIGGERS}).merge_from_list([f"training.{key}=2"])


BOMB = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    for before, name in itertools.pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (BOMB, "more than 20000 values that aliases stand for"),
        ("a: &a [*a]", "more than 20000 values that aliases stand for"),
        ("a: !!bool maybe", "not YAML: 'maybe'"),
        (f"a: 0x{'f' * 5000}", "not YAML: Exceeds the limit"),
        ("#" * (1 << 20) + "\n", "1048577 bytes long; expected at most 1048576"),
    ],
    ids=["aliases", "itself", "tag", "number", "size"],
)
def test_a_file_that_stands_for_more_than_a_config_is_refused(
    tmp_path: Path, text: str, part: str
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert part in complaint(load_yaml, tmp_path / "c.yaml")


def test_aliases_and_merged_sections_are_read_and_never_written(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: *a\n")
    assert load_yaml(path) == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1}}
    shared = [1, 2]
    path.write_text(dump_yaml({"first": shared, "last": shared}))
    assert "&" not in path.read_text()
    assert load_yaml(path) == {"first": shared, "last": shared}


def test_a_pipe_for_a_config_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    assert "no regular file" in complaint(load_yaml, tmp_path / "config.yaml")


def test_defaults_are_checked_on_the_command_line_too() -> None:
    class Nothing(Tiny):
        @classmethod
        def default_config(cls) -> Any: ...

    with pytest.raises(ConfigError, match=r"Begin default_config with .* and return the config"):
        load_config(Nothing, default_argument_parser().parse_args([]))


def test_values_within_the_config_may_be_written(tmp_path: Path) -> None:
    class Writing(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.config.training.log_interval = 3

    trained(Writing, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("modle", r"Did you mean 'model'\?$"),
        ("zzz", r"There are: model, optim\.$"),
        ("training", r"Begin default_config with `config = super\(\)\.default_config\(\)`"),
    ],
)
def test_a_key_that_code_mistypes_is_answered_with_the_one_that_is_like_it(
    name: str, hint: str
) -> None:
    config = Config({"model": {0: 1}, "optim": {}})
    assert not hasattr(config.model, name)  # whose keys are no names
    assert not hasattr(config.optim, name)
    with pytest.raises(AttributeError, match=f"no key '{name}' here\\. {hint}"):
        getattr(config, name)
    assert not hasattr(config, name)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config

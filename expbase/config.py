"""Configs: YAML files, options, conversions. The only file that imports yacs.

The defaults declare the keys and their types; a file and the command line may change values but
not add keys. Numbers are read as a person means them (`1` for a float, `1e5` for an int, `010` for
ten), and where a text is expected what was written is the text, in lists, too.

    config = Config({"optim": {"lr": 0.1}, "training": get_default_training_config()})
    config.merge_from_file("digits.yaml")
    config.merge_from_list(["optim.lr", "1e-3"])        # or ["optim.lr=1e-3"]
"""

from __future__ import annotations

import ast
import inspect
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from yacs.config import CfgNode

from expbase.base import yaml_words
from expbase.base.did_you_mean import did_you_mean
from expbase.base.errors import AttributeMistake
from expbase.base.errors import ConfigError as ConfigError
from expbase.base.files import DAMAGES, read_bytes
from expbase.base.yaml_words import BOOLEANS, Word, number_in, values_of
from expbase.training import (
    BY_DEFAULT,
    EXAMPLES,
    TRAINING,
    TrainingKeys,
    check_keys,
    refuse_gone,
)

# Sections that a mixin adds: who has forgotten the mixin is told.
_OF_MIXINS = {
    section: f" The mixin {mixin} has it: `from expbase.extras.mixins import {mixin}`, and name it "
    "before ExperimentBase."
    for section, mixin in (
        ("early_stopping", "EarlyStopping"),
        ("ema", "ExponentialMovingAverage"),
        ("clipping", "GradientClipping"),
    )
}
CONFIG = "config.yaml"  # in the directory of a run: its config, as completed
# Of a YAML file: a larger one is data, named by mistake. What a run has written itself may be long.
_MOST_BYTES = 1 << 20
_MOST_BYTES_OF_RUN = 1 << 26


class Config(CfgNode):  # type: ignore[misc]  # yacs has no types
    """A tree of named values, read and written as attributes: `config.training.seed`.

    A section that is empty in the defaults is open: it takes any keys. What cannot be merged is a
    ConfigError, which leaves the config as it was.
    """

    training: TrainingConfig
    """The section that every experiment has, in its whole config."""

    def __init__(
        self,
        init_dict: Mapping[str, Any] | None = None,
        key_list: Sequence[Any] | None = None,  # yacs' own, for messages of its own
        new_allowed: bool = False,
        **keywords: Any,
    ) -> None:
        if keywords:
            given = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
            raise ConfigError(f"Config({given}): expected a mapping: Config({keywords!r}).")
        if not isinstance(init_dict, (Mapping, NoneType)):
            raise ConfigError(
                f"Config({init_dict!r}): expected a mapping, such as {{'lr': 0.1}}. "
                "A file is read by merge_from_file."
            )
        _check_types(init_dict or {})
        super().__init__(init_dict, None, new_allowed)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__"):  # Python asks for many
            raise AttributeError(name)
        names = [*map(str, self)]
        hint = f" There are: {', '.join(names) or 'none'}."
        if name == "training":
            hint = " Begin default_config with `config = super().default_config()`."
        raise AttributeMistake(
            f"config: no key {name!r} here.{did_you_mean(name, names, otherwise=hint)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        _check_types(value, name)
        is_plain = isinstance(value, dict) and not isinstance(value, Config)
        super().__setattr__(name, Config(value) if is_plain else value)

    def merge_from_file(self, paths: str | Path | Sequence[str | Path]) -> None:
        """Changes the values that a YAML file names.

        Args:
            paths: The file, or several, of which a later one wins.

        Raises:
            ConfigError: A file cannot be read, or names what is not there.
        """
        for path in [paths] if isinstance(paths, (str, Path)) else paths:
            loaded = _load(path)
            _refuse_bases({k: v for k, v in loaded.items() if k not in self}, Path(path))
            self.merge_from_other_cfg(loaded, str(path))

    def merge_from_list(self, words: Sequence[str]) -> None:
        """Changes the values that options name.

        Args:
            words: `KEY VALUE …`, `KEY=VALUE …`, or both.

        Raises:
            ConfigError: There is no such key, or its value has another type.
        """
        known = flatten(self)
        changes = {}
        queue = list(words)
        while queue:
            key, equals, text = str(queue.pop(0)).partition("=")
            if not equals:
                _check_key(key, *queue[:1])
                text = queue.pop(0)
            # Where a text is, all of it is the text. A script may give values, too.
            is_ready = isinstance(known.get(key), str) or not isinstance(text, str)
            changes[key] = text if is_ready else _parsed(text, f"options: {key}: {text!r}")
        self.merge_from_other_cfg(changes, "options")

    def merge_from_other_cfg(self, other: Mapping[str, Any], source: str = "config") -> None:
        """Changes the values that another tree names.

        Args:
            other: The tree.
            source: Where it comes from, for messages.

        Raises:
            ConfigError: There is no such key, or its value has another type.
        """
        self.update(_merged(self, other, source))


class TrainingConfig(TrainingKeys, Config):
    """The section `training`. Keys of your own may be added."""


def _check_key(key: str, *value: Any) -> None:
    """Raises a ConfigError if a word without an equals sign is no key that a value follows."""
    if "＝" in key:
        raise ConfigError(f"options: {key!r} has a full-width ＝; expected KEY=VALUE.")
    if key.endswith((".yaml", ".yml")):
        raise ConfigError(f"options: {key!r} is a file; expected --config {key} for each file.")
    if not value:
        raise ConfigError(f"options: {key!r} has no value; expected KEY VALUE or KEY=VALUE.")
    if str(value[0]).startswith("="):
        raise ConfigError(f"options: {key} = …: expected {key}=VALUE, without spaces.")


def _refuse_bases(loaded: Mapping[str, Any], path: Path) -> None:
    """Raises a ConfigError if a file names others to build on, as those of PaddleDetection do."""
    for key, value in loaded.items():
        bases = values_of(value)
        if key.strip("_").upper() == "BASE" and bases and isinstance(bases, (str, list)):
            bases = [bases] if isinstance(bases, str) else bases
            words = [f"--config {path.parent / str(base)}" for base in bases]
            raise ConfigError(
                f"{path}: {key}: a config file includes no others; expected each as an option, "
                f"where a later one wins: {' '.join(words)} --config {path}."
            )


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML mapping; nothing in it is executed.

    What is a number to a person is one, and `010`, `1:30` and `2020-01-01` are texts.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or holds no mapping.
    """
    loaded: dict[str, Any] = values_of(_load(path))
    return loaded


def _load(path: str | Path) -> dict[str, Any]:
    """Returns the mapping of a YAML file, as `load_yaml`, with a Word for each plain scalar."""
    try:
        most = _MOST_BYTES_OF_RUN if Path(path).name == CONFIG else _MOST_BYTES
        text = read_bytes(Path(path), most).decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}; expected a file that was saved as UTF-8.") from error
    loaded = _parsed(text, str(path))
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: holds no mapping; expected `key: value` lines.")
    return loaded


def dump_yaml(config: Mapping[str, Any]) -> str:
    """Returns the config as YAML text that `load_yaml` reads back to the same values."""
    _check_types(config)
    return yaml_words.dump(_plain(config))


def _plain(value: Any) -> Any:
    """Returns the value as plain dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values by full key: `{"training.seed": 0, …}`; an empty section is a `{}`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = dict(value) if isinstance(value, Mapping) else value
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the full keys whose values differ, with both; None if a side has no such key."""
    before = flatten(_plain(old))
    after = flatten(_plain(new))
    pairs = {key: (before.get(key), after.get(key)) for key in before | after}
    # As texts, because nan is not equal to itself.
    return {key: pair for key, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}


def fill_in(output: str, config: Mapping[str, Any]) -> str:
    """Returns the output path with config values in place of their `{full.key}`s; raises
    ConfigError.
    """
    try:
        for _, name, form, conversion in string.Formatter().parse(output):
            if name and not conversion and "{" not in str(form):
                _check_form(name, string.Formatter().get_field(name, (), config)[0], form or "")
        return str(Path(output.format_map(config)))
    except ConfigError as error:
        raise ConfigError(f"--output: {output!r}: {error}") from error.__cause__
    except AttributeError as error:
        near = str(error).removeprefix("config: ")
        raise ConfigError(f"--output: {output!r} names no config value: {near}") from error
    except (LookupError, ValueError) as error:
        raise ConfigError(
            f"--output: {output!r} names no config value: {error}; expected one of "
            f"{', '.join(flatten(config))}."
        ) from error


def _check_form(name: str, value: Any, form: str) -> None:
    """Raises a ConfigError if a config value cannot be a part of a path in this form."""
    if isinstance(value, Mapping):
        keys = ", ".join(f"{{{name}.{key}}}" for key in value)
        raise ConfigError(f"{name} is a section; expected one of its keys: {keys}.")
    try:
        format(value, form)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{form!r} given as the form of {name}, {value!r}: {error}; expected {{{name}}}, or "
            "one of Python's forms, such as .1e for a number."
        ) from error


_NAMES_OF_TYPES = {
    bool: "true or false,",
    int: "a whole number",
    float: "a number",
    str: "a text",
}
_ANY = "a number, a text, true or false, None, a list or tuple of these, or a section"
_TYPES = (int, float, bool, str, list, tuple, NoneType)  # those that yacs takes


def _check_types(value: Any, key: str = "") -> None:
    """Raises a ConfigError if a value, or one in it, is of a type that no config file can hold."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_types(item, f"{key}.{name}" if key else str(name))
    elif type(value) not in _TYPES:
        raise ConfigError(f"config: {key}: {value!r} is a {type(value).__name__}; expected {_ANY}.")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_types(item, f"{key}[{index}]")


def coerced(value: Any, default: Any, key: str, source: str) -> Any:
    """Returns the value as the default's type, if a person would read it so."""
    is_given = default is BY_DEFAULT and values_of(value) not in (BY_DEFAULT, "None")
    if is_given or default == []:
        default = EXAMPLES.get(key, default)
    try:
        converted = _converted(value, [default])
        _check_types(converted)
    except (LookupError, OverflowError, SyntaxError, TypeError, ValueError):
        given = f"{source}: {key}: {value!r}"
        if default is None:
            raise ConfigError(f"{given} given; expected {_ANY}.") from None
        name = _NAMES_OF_TYPES.get(type(default), f"a {type(default).__name__}")
        raise ConfigError(f"{given} given; expected {name} like {default!r}.") from None
    return converted


# Every error of these conversions means that the value has the wrong type.


def _converted(value: Any, examples: Sequence[Any]) -> Any:
    """Returns the value as the examples are: the one default, or all items of a list that is it."""
    kinds = {type(example) for example in examples}
    if kinds == {int, float}:
        return _number(value)
    if len(kinds) != 1:  # there are none, or they tell nothing
        return values_of(value)
    kind: Any = next(iter(kinds))
    if kind in (NoneType, str) and values_of(value) in (None, "None"):
        # As yacs reads it, in a file or an option; but for a text that was "None" all along.
        return "None" if "None" in examples and values_of(value) else None
    if kind is bool:
        return BOOLEANS[_text(value).lower()]
    if kind is str:
        return value.text if isinstance(value, Word) else _checked(value, str)
    if kind is float:
        return float(_number(value))
    if kind is int:
        return _whole(_number(value))
    if kind in (list, tuple):
        return kind(_converted_items(value, examples))
    if issubclass(kind, Mapping):
        converted = _converted_mapping(_checked(value, Mapping), examples)
        return kind(converted) if issubclass(kind, CfgNode) else converted
    return values_of(value)


def _converted_items(value: Any, examples: Sequence[Any]) -> list[Any]:
    """Returns the items of a list as those of the examples are; of unlike ones by their places."""
    if isinstance(value, (str, Word)):
        value = ast.literal_eval(_text(value))  # "(1, 2)", as yacs reads it
    given = _checked(value, (list, tuple))
    # Of those that are alike one: each of many items is compared with all of them.
    items = [*{_form(item): item for example in examples for item in example}.values()]
    if not items:
        return [*values_of(given)]
    kinds = {type(item) for item in items}
    are_alike = len(kinds) == 1 or kinds == {int, float}
    as_long = [example for example in examples if len(example) == len(given)]
    places = [items] * len(given) if are_alike or not as_long else [*zip(*as_long, strict=True)]
    return [_converted(item, place) for item, place in zip(given, places, strict=True)]


def _form(example: Any) -> Any:
    """Returns all that an example says: types, lengths and keys, and whether it is "None"."""
    if isinstance(example, Mapping):
        return type(example), *((key, _form(item)) for key, item in example.items())
    if isinstance(example, (list, tuple)):
        return type(example), *map(_form, example)
    return type(example), example == "None"


def _converted_mapping(value: Mapping[Any, Any], examples: Sequence[Any]) -> dict[Any, Any]:
    """Returns an item of a list that is a mapping; keys that no example has are legal."""
    names = {str(name): name for example in examples for name in example}
    keys = {key: names.get(str(key), key) for key in value}
    return {
        name: _converted(value[key], [one[name] for one in examples if name in one])
        for key, name in keys.items()
    }


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _text(value: Any) -> str:
    return value.text if isinstance(value, Word) else str(value)


def _whole(number: Any) -> int:
    number = number if isinstance(number, int) else float(number)
    if number != int(number):
        raise ValueError
    return int(number)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise TypeError  # Python would take True for the number 1
    return number_in(_text(value)) if isinstance(value, (str, Word)) else value


def _merged(config: Config, changes: Mapping[str, Any], source: str) -> Config:
    """Returns a changed copy. In the changes `optim: {lr: 1}` and `optim.lr: 1` are the same."""
    merged: Config = config.clone()
    for key, value in flatten(changes).items():
        node: Any = merged
        name, rest = _first_key(node, key)
        while rest:
            if _takes(node, name) and node.get(name) in (None, {}):
                node[name] = Config()
            node = node.get(name) if isinstance(node, Config) else None
            name, rest = _first_key(node, rest)
        if not _takes(node, name):
            refuse_gone(key)
            section = key.partition(".")[0]
            hint = _OF_MIXINS.get(section) if "." in key and section not in config else None
            raise ConfigError(
                f"{source}: unknown key {key!r}."
                + (hint or did_you_mean(key, sorted(flatten(config))))
            )
        default = node.get(name)
        if not isinstance(default, Config):
            node[name] = coerced(value, default, key, source)
        elif values_of(value) not in (None, {}):  # a section with nothing under it changes nothing
            keys = ", ".join(map(str, default)) or "keys of your own"
            raise ConfigError(f"{source}: {key}: {value!r} given; expected a section with {keys}.")
    return merged


def adopt(config: Config, of_run: Mapping[str, Any]) -> dict[str, Any]:
    """Gives a config the keys of a run that it lacks, since they have left `default_config`.

    Args:
        config: The one of the code of now.
        of_run: The config of the run; it may be flat.

    Returns:
        The run's values that are new, by their full keys.
    """
    added = {}
    for key, value in flatten(of_run).items():
        node: Any = config
        name, rest = _first_key(node, key)
        while rest and isinstance(node.get(name), Config):
            node = node[name]
            name, rest = _first_key(node, rest)
        if name in node or _takes(node, name):
            continue
        added[key] = value
        for section in reversed(rest.split(".") if rest else []):
            value = {section: value}
        node[name] = Config(value) if isinstance(value, dict) else value
    return added


def _first_key(node: Any, key: str) -> tuple[Any, str]:
    """Returns the first one of the keys in a full key, as a section has it, and the rest.

    A section may have numbers for keys, and names with dots.
    """
    own = [name for name in node or () if f"{key}.".startswith(f"{name}.")]
    name = max(own, key=lambda one: len(str(one)), default=key.partition(".")[0])
    return name, key[len(str(name)) + 1 :]


def _takes(node: Any, name: str) -> bool:
    """Returns whether a value may have this key: a section that has it, or an open one."""
    if not isinstance(node, Config):
        return False
    if not node:
        node.set_new_allowed(True)  # an open section stays open when it has keys
    return name in node or bool(node.is_new_allowed())


def _parsed(text: str, source: str) -> Any:
    try:
        loaded = yaml_words.parse_words(text)
        repr(loaded)  # a number of very many digits can be read, as 0x…, and not be written
        return loaded
    # Its constructors end in any of these: at `!!bool x`, say.
    except (yaml.YAMLError, *DAMAGES) as error:
        wide = re.search(r"(?m)^\s*([\w.]+)：", text)
        hint = f"\nExpected `{wide[1]}: `, with a colon of ASCII and a space." if wide else ""
        raise ConfigError(f"{source}: not YAML: {error}{hint}") from error


def get_default_training_config() -> TrainingConfig:
    """Makes the `training` section that every experiment has.

    Returns:
        Its keys with their defaults.
    """
    return TrainingConfig(TRAINING)


def fill(config: Mapping[str, Any]) -> Config:
    """Returns a copy of an experiment's config with the training keys that it leaves out.

    Raises:
        ConfigError: One of its three required keys is missing (max_epoch alone is enough), a key is
            misspelt, or a value has a wrong type.
    """
    given = (config or {}).get("training") or {}
    check_keys(given)
    training: dict[str, Any] = {**TRAINING}
    for key, value in given.items():
        training[key] = coerced(value, training.get(key), f"training.{key}", "config")
    return Config({**config, "training": training})


def defaults_of(experiment: Any) -> Config:
    """Returns the completed config that an experiment class has by default.

    Raises:
        ConfigError: Its `default_config` cannot be called on the class, or `fill` raises it.
    """
    for base in experiment.__mro__:  # a mixin's, too
        found = vars(base).get("default_config")
        try:
            if not isinstance(found, (classmethod, staticmethod, type(None))):
                inspect.signature(found).bind()
        except TypeError:
            raise ConfigError(
                f"{base.__name__}.default_config: cannot be called on the class, before there is "
                "an experiment; expected @classmethod above `def default_config(cls):`."
            ) from None
    return fill(experiment.default_config())

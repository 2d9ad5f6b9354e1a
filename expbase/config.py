"""Configurations: defaults, YAML files, overrides, checks. The only file that imports yacs.

A config is a tree of named values. Its defaults declare which keys exist and of what type; a
file and the command line may change values, never add keys. Numbers are taken as a person means
them (`1` for a float, `1e5` for an int); all other mismatches are errors that name the key, and
a failed change leaves the config as it was. Values are plain data: nothing in a config file is
executed.

    config = Config({"optim": {"lr": 0.1}, "training": get_default_training_config()})
    config.merge_from_file("digits.yaml")
    config.merge_from_list(["optim.lr", "1e-3"])        # or ["optim.lr=1e-3"]
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yacs.config import CfgNode

_TRAINING_DEFAULTS: dict[str, Any] = {
    # When to end.
    "max_iteration": 10000,  # iterations; 0: no limit, if max_epoch is set
    "max_epoch": 0,  # passes over the data; 0: no limit
    # What happens how often.
    "valid_interval": 1000,  # iterations; 0: never
    "save_interval": 1000,  # iterations; 0: never
    "log_interval": 10,  # iterations; 0: never
    "valid_every_epoch": 0,  # passes; 0: never
    "save_every_epoch": 0,  # passes; 0: never
    "accumulation_steps": 1,  # batches per update
    # Repeatability.
    "seed": 0,  # of everything that is drawn
    "deterministic": False,  # ask the device for repeatable kernels
    # Which checkpoints are kept.
    "keep_last": 3,  # the newest n; 0: all
    "keep_every": 0,  # and those at every n-th iteration; 0: none
    "keep_best": 1,  # and the best n by `monitor`; 0: none
    "monitor": "",  # a metric of valid(), "accuracy" say; "": none
    "monitor_mode": "max",  # is more better ("max") or less ("min")?
    "background_save": True,  # write files while training goes on
    # Limits.
    "time_limit_seconds": 0,  # seconds from start to stop and save; 0: none
    "hang_seconds": 600,  # seconds without progress until stacks are logged; 0: never
    # Tests.
    "sanity_batches": 0,  # batches that valid() is tried on before training
    "overfit_batches": 0,  # train on this many batches over and over; 0: on all
    "nonfinite": "error",  # a loss that is not finite: "error", "warn" or "ignore"
}

_REQUIRED = ("max_iteration", "valid_interval", "save_interval")
_CHOICES = {"monitor_mode": ("max", "min"), "nonfinite": ("error", "warn", "ignore")}


class ConfigError(ValueError):
    """What a person wrote into a config, a file or an option cannot be used."""


class Config(CfgNode):  # type: ignore[misc]  # yacs has no types
    """A tree of named values, read and written as attributes: `config.training.seed`.

    An empty section among the defaults is an open one: it takes any keys.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _as_section(value))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _as_section(value))

    def merge_from_file(self, path: str | Path) -> None:
        """Changes the values that a YAML file names.

        Raises:
            ConfigError: The file cannot be read, is not YAML, or does not fit the defaults.
        """
        self._merge(load_yaml(path), str(path))

    def merge_from_list(self, words: Sequence[str]) -> None:
        """Changes the values that options name: `KEY VALUE …`, `KEY=VALUE …`, or both.

        Raises:
            ConfigError: A word has no partner, or does not fit the defaults.
        """
        self._merge(_parse_options(words), "options")

    def merge_from_other_cfg(self, other: Mapping[str, Any], source: str = "config") -> None:
        """Changes the values that another tree names.

        Args:
            other: The tree.
            source: Where it stands, for messages.

        Raises:
            ConfigError: It does not fit the defaults.
        """
        self._merge(other, source)

    def _merge(self, changes: Mapping[str, Any], source: str) -> None:
        merged = _merged(self, changes, source, known=sorted(flatten(self)))
        self.clear()
        self.update(merged)


def _as_section(value: Any) -> Any:
    plain = isinstance(value, dict) and not isinstance(value, Config)
    return Config(value) if plain else value


def get_default_training_config() -> Config:
    """The `training` section that every experiment has, with its defaults."""
    return Config(_TRAINING_DEFAULTS)


def complete(config: Mapping[str, Any]) -> Config:
    """A copy of an experiment's config with the training keys that it leaves out, checked.

    Raises:
        ConfigError: As `fill` and `check_training`.
    """
    completed = fill(config)
    check_training(completed.training)
    return completed


def fill(config: Mapping[str, Any]) -> Config:
    """A copy of an experiment's config with the training keys that it leaves out.

    Raises:
        ConfigError: No `training` section, one of its three triggers missing, a mistyped
            key, or a value of a wrong type.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config: {config!r} given; expected a Config with a `training` section. "
            "Start from get_default_training_config()."
        )
    if not isinstance(config.get("training"), Mapping):
        raise ConfigError(
            "config: no `training` section; expected one with "
            f"{', '.join(_REQUIRED)}. Start from get_default_training_config()."
        )
    given = config["training"]
    for key in _REQUIRED:
        if key not in given:
            raise ConfigError(
                f"training: key {key!r} is missing; expected a whole number of iterations. "
                "Add it, or start from get_default_training_config()."
            )
    _check_own_keys(given)
    training = get_default_training_config()
    for key in _TRAINING_DEFAULTS.keys() & given.keys():
        training[key] = coerced(given[key], training[key], f"training.{key}", "config")
    own = {key: given[key] for key in given if key not in _TRAINING_DEFAULTS}
    completed = Config({key: value for key, value in config.items() if key != "training"})
    completed["training"] = Config({**training, **own})
    return completed


def check_training(training: Mapping[str, Any]) -> None:
    """Checks the values of a complete training section.

    Raises:
        ConfigError: One of them is of no use.
    """
    for key, default in _TRAINING_DEFAULTS.items():
        value = training[key]
        where = f"training.{key}"
        if isinstance(default, int) and not isinstance(default, bool):
            least = 1 if key == "accumulation_steps" else 0
            if value < least:
                raise ConfigError(f"{where}: {value!r} given; expected {least} or more.")
        if key in _CHOICES and value not in _CHOICES[key]:
            choices = ", ".join(map(repr, _CHOICES[key]))
            raise ConfigError(f"{where}: {value!r} given; expected one of {choices}.")
    if not training["max_iteration"] and not training["max_epoch"]:
        raise ConfigError(
            "training.max_iteration: 0 given; expected 1 or more. "
            "Without a limit of iterations set training.max_epoch."
        )


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML mapping.

    Raises:
        ConfigError: Another kind of file, unreadable, not YAML, or no mapping.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"{path}: a config file ending in {path.suffix!r}; expected .yaml or .yml. "
            "Code in config files is not run."
        )
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        # yaml lets through what its own constructors raise, of a date like 2020-13-45, say.
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if loaded is None:
        raise ConfigError(f"{path}: empty; expected `key: value` lines.")
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{path}: a {type(loaded).__name__} stands there; expected `key: value` lines."
        )
    return loaded


def dump_yaml(config: Mapping[str, Any]) -> str:
    """The config as YAML text that `load_yaml` reads back to the same values."""
    text: str = yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def to_dict(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as plain dicts and lists."""
    return {str(key): _plain(value) for key, value in config.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values by full key: `{"training.seed": 0, …}`; an empty section is a `{}`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = dict(value) if isinstance(value, Mapping) else value
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The full keys whose values differ, with both values; None where a side has no such key."""
    before, after = flatten(to_dict(old)), flatten(to_dict(new))
    keys = list(before) + [key for key in after if key not in before]
    pairs = {key: (before.get(key), after.get(key)) for key in keys}
    # By their texts too: a nan that was read back is not equal to itself.
    return {
        key: (one, other)
        for key, (one, other) in pairs.items()
        if (key in before) != (key in after) or (one != other and repr(one) != repr(other))
    }


def coerced(value: Any, default: Any, key: str, source: str) -> Any:
    """The value as the default's type, if a person would read it so.

    Raises:
        ConfigError: It is of another type.
    """
    converted = _convert(value, default)
    if converted is _UNFIT:
        raise ConfigError(
            f"{source}: {key}: {value!r} given; expected {_TYPE_NAMES[type(default)]} "
            f"like {default!r}."
        )
    return converted


_UNFIT = object()
_TYPE_NAMES = {
    bool: "true or false,",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    tuple: "a list",
}


def _convert(value: Any, default: Any) -> Any:
    if (
        default is None
        or isinstance(value, type(default))
        and type(default) not in (int, list, tuple)
    ):
        return value
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(str(value).lower(), _UNFIT)
    if isinstance(value, bool):
        return _UNFIT
    if isinstance(default, (int, float)):
        return _convert_number(value, default)
    if isinstance(default, str) and isinstance(value, int):
        return str(value)
    if isinstance(default, (list, tuple)) and isinstance(value, (list, tuple)):
        return _convert_items(value, default)
    return _UNFIT


def _convert_number(value: Any, default: int | float) -> Any:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return _UNFIT
    if isinstance(default, float):
        return number
    if isinstance(value, int):
        return value
    return int(number) if number.is_integer() else _UNFIT


def _convert_items(values: Sequence[Any], default: Sequence[Any]) -> Any:
    # The items are held to the default's only where it shows one type; [] and mixed lists take all.
    kinds = {type(item) for item in default}
    if len(kinds) == 1 and kinds <= {bool, int, float, str}:
        values = [_convert(value, default[0]) for value in values]
        if _UNFIT in values:
            return _UNFIT
    return tuple(values) if isinstance(default, tuple) else list(values)


def _merged(
    config: Config, changes: Mapping[str, Any], source: str, known: list[str], prefix: str = ""
) -> Config:
    merged: Config = config.clone()
    if not merged:
        merged.set_new_allowed(True)  # an open section stays open when it has keys
    for name, value in changes.items():
        key = f"{prefix}{name}"
        if name not in merged and not merged.is_new_allowed():
            # Down to the value: under a misspelt section, its own name finds the right one.
            if "." in str(name) and source != "options":
                section, _, rest = str(name).partition(".")
                raise ConfigError(
                    f"{source}: key {key!r} with a dot; expected a section in a file:\n"
                    f"{section}:\n  {rest}: {value!r}"
                )
            key = next(iter(flatten({name: value}, prefix)))
            raise ConfigError(f"{source}: unknown key {key!r}.{_suggestion(key, known)}")
        default = merged.get(name)
        if isinstance(value, _OptionText):
            value = value.read_for(default, key)
        if default is None and isinstance(value, Mapping):
            merged[name] = _merged(Config(), value, source, known, f"{key}.")
        elif not isinstance(default, Config):
            merged[name] = coerced(value, default, key, source)
        elif isinstance(value, Mapping):
            merged[name] = _merged(default, value, source, known, f"{key}.")
        elif value is not None:  # a section with nothing under it changes nothing
            raise ConfigError(
                f"{source}: {key}: {value!r} given; expected a section with "
                f"{', '.join(default) or 'keys of your own'}."
            )
    return merged


def _check_own_keys(given: Mapping[str, Any]) -> None:
    # Keys of the user's own are welcome; one that is nearly ours, which is absent, is a slip.
    absent = [key for key in _TRAINING_DEFAULTS if key not in given]
    for key in given:
        if key not in _TRAINING_DEFAULTS:
            near = difflib.get_close_matches(key, absent, n=1, cutoff=0.8)
            near = near or difflib.get_close_matches(key, _TRAINING_DEFAULTS, n=1, cutoff=0.92)
            if near:
                raise ConfigError(
                    f"training: unknown key {key!r}. Did you mean {near[0]!r}? "
                    "A key of your own stands better in a section of its own."
                )


def did_you_mean(name: str, known: Iterable[Any], cutoff: float = 0.5) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    texts = [*map(str, known)]
    near = difflib.get_close_matches(name, texts, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else f" Expected one of {', '.join(texts)}."


def _suggestion(key: str, known: list[str]) -> str:
    # The last part alone finds a key that was written without, or under a wrong, section.
    last = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    near = last or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Known keys: {', '.join(known)}."


class _OptionText(str):
    """An option's value, not yet read: `1e5` is a text for a text, a number for a number."""

    def read_for(self, default: Any, key: str) -> Any:
        if isinstance(default, str):
            return str(self)
        try:
            return yaml.load(self, Loader=_Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"options: {key}: {str(self)!r} cannot be read: {error}") from error


def _parse_options(words: Sequence[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    queue = list(words)
    while queue:
        key, equals, text = queue.pop(0).partition("=")
        if not equals and not queue:
            raise ConfigError(f"options: {key!r} has no value; expected KEY VALUE or KEY=VALUE.")
        _plant(tree, key, _OptionText(text if equals else queue.pop(0)))
    return tree


def _plant(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"options: {key}: {section!r} was given a value before.")
    tree[name] = value


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML's safe loader, with the numbers of YAML 1.2, and without silence at a key given twice.

    `1e-3` is a number; `012`, `12:30` and `1_000` are not octal, minutes and so on, but texts.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in names[:place]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} stands there twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Its partner: it quotes a text that the loader would take for a number."""


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_POINT = re.compile(r"([-+]?(\d+\.\d*|\.\d+)|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9]\d*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(_FLOAT, _POINT, list("-+.0123456789"))
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))

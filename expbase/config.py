"""Configs: YAML files, options, conversions. The only file that imports yacs.

The defaults declare the keys and their types; a file and the command line may change values but
not add keys. Numbers are read as a person means them (`1` for a float, `1e5` for an int).

    config = Config({"optim": {"lr": 0.1}, "training": get_default_training_config()})
    config.merge_from_file("digits.yaml")
    config.merge_from_list(["optim.lr", "1e-3"])        # or ["optim.lr=1e-3"]
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yacs.config import CfgNode

from expbase.base.exit_codes import ExitCode
from expbase.base.files import DAMAGES, read_bytes

# Keys that are gone, or another library's, and what to do instead.
_GONE = {
    "training.num_eval_sanity_batch": "--smoke tries a whole run, valid() included.",
    "training.sanity_batches": "--smoke tries a whole run, valid() included.",
    "training.overfit_batches": "Set self.train_loader to a list of the few batches.",
}
# Of a YAML file, and of the values in it, where aliases (`*name`) count as what they stand for: a
# few lines of aliases of aliases may stand for more than any memory holds.
_MOST_BYTES = 1 << 20
_MOST_VALUES = 20_000


class ConfigError(ValueError):
    """A value that a user wrote into a config, a file or an option cannot be used."""

    exit_code = ExitCode.MISTAKE


class Config(CfgNode):  # type: ignore[misc]  # yacs has no types
    """A tree of named values, read and written as attributes: `config.training.seed`.

    A section that is empty in the defaults is open: it takes any keys. What cannot be merged is a
    ConfigError, which leaves the config as it was.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_plain = isinstance(value, dict) and not isinstance(value, Config)
        super().__setattr__(name, Config(value) if is_plain else value)

    def merge_from_file(self, paths: str | Path | Sequence[str | Path]) -> None:
        """Changes the values that a YAML file names; of several files a later one wins."""
        for path in [paths] if isinstance(paths, (str, Path)) else paths:
            self.merge_from_other_cfg(load_yaml(path), str(path))

    def merge_from_list(self, words: Sequence[str]) -> None:
        """Changes the values that options name: `KEY VALUE …`, `KEY=VALUE …`, or both."""
        known = flatten(self)
        changes = {}
        queue = list(words)
        while queue:
            key, equals, text = str(queue.pop(0)).partition("=")
            if not equals:
                _check_key(key, *queue[:1])
                text = queue.pop(0)
            # `1e5` is a text where a text is, else a number. A script may give values, too.
            is_ready = isinstance(known.get(key), str) or not isinstance(text, str)
            changes[key] = text if is_ready else _parsed(text, f"options: {key}: {text!r}")
        self.merge_from_other_cfg(changes, "options")

    def merge_from_other_cfg(self, other: Mapping[str, Any], source: str = "config") -> None:
        """Changes the values that another tree names; errors name its `source`."""
        self.update(_merged(self, other, source))


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


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML mapping; nothing in it is executed.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        text = read_bytes(Path(path), _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
    loaded = _parsed(text, str(path))
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: holds no mapping; expected `key: value` lines.")
    return loaded


def dump_yaml(config: Mapping[str, Any]) -> str:
    """Returns the config as YAML text that `load_yaml` reads back to the same values."""
    text: str = yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


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
        return str(Path(output.format_map(config)))
    except (AttributeError, LookupError, ValueError) as error:
        raise ConfigError(
            f"--output: {output!r} names no config value: {error}; expected one of "
            f"{', '.join(flatten(config))}."
        ) from error


_TYPE_NAMES = {bool: "true or false,", int: "a whole number", float: "a number", str: "a text"}


def coerced(value: Any, default: Any, key: str, source: str) -> Any:
    """Returns the value as the default's type, if a person would read it so."""
    try:
        return _converted(value, default)
    except (LookupError, OverflowError, SyntaxError, TypeError, ValueError):
        name = _TYPE_NAMES.get(type(default), f"a {type(default).__name__}")
        raise ConfigError(
            f"{source}: {key}: {value!r} given; expected {name} like {default!r}."
        ) from None


def _converted(value: Any, default: Any) -> Any:
    # Every error of a conversion means that the value has the wrong type.
    if value in (None, "None") and (default is None or isinstance(default, str)):
        return None  # as yacs reads it, in a file or an option
    if isinstance(value, str) and isinstance(default, (list, tuple)):
        value = ast.literal_eval(value)  # "(1, 2)", as yacs reads it
    if isinstance(default, bool):
        return {"true": True, "false": False}[str(value).lower()]
    if isinstance(value, bool) and default is not None:
        raise TypeError  # Python would take True for the number 1
    if isinstance(default, float):
        return float(value)
    if isinstance(default, int):
        number = value if isinstance(value, int) else float(value)
        if number != int(number):
            raise ValueError
        return int(number)
    if isinstance(default, (list, tuple)) and isinstance(value, (list, tuple)):
        return type(default)(value)
    if default is not None and not isinstance(value, type(default)):
        raise TypeError
    return value


def refuse_gone(key: str) -> None:
    """Raises a ConfigError for a key that is gone, which says what to do instead."""
    if key in _GONE:
        raise ConfigError(f"{key}: this key is gone. {_GONE[key]}")


def _merged(config: Config, changes: Mapping[str, Any], source: str) -> Config:
    """Returns a changed copy. In the changes `optim: {lr: 1}` and `optim.lr: 1` are the same."""
    merged: Config = config.clone()
    for key, value in flatten(changes).items():
        *sections, name = key.split(".")
        node: Any = merged
        for section in sections:
            if _takes(node, section) and node.get(section) in (None, {}):
                node[section] = Config()
            node = node.get(section) if isinstance(node, Config) else None
        if not _takes(node, name):
            refuse_gone(key)
            known = sorted(flatten(config))
            raise ConfigError(f"{source}: unknown key {key!r}.{did_you_mean(key, known)}")
        default = node.get(name)
        if not isinstance(default, Config):
            node[name] = coerced(value, default, key, source)
        elif value not in (None, {}):  # a section with nothing under it changes nothing
            keys = ", ".join(default) or "keys of your own"
            raise ConfigError(f"{source}: {key}: {value!r} given; expected a section with {keys}.")
    return merged


def _takes(node: Any, name: str) -> bool:
    """Returns whether a value may have this key: a section that has it, or an open one."""
    if not isinstance(node, Config):
        return False
    if not node:
        node.set_new_allowed(True)  # an open section stays open when it has keys
    return name in node or bool(node.is_new_allowed())


def did_you_mean(name: str, known: Iterable[Any]) -> str:
    """Returns the end of a message about an unknown name: the nearest known one, or all of them."""
    texts = [*map(str, known)]
    # The last part alone finds a key that was written without its section or under a wrong one.
    near = [text for text in texts if text.split(".")[-1] == name.split(".")[-1]]
    near = near or nearest(name, texts, 0.5)
    return f" Did you mean {near[0]!r}?" if near else f" Expected one of {', '.join(texts)}."


def nearest(name: str, known: Iterable[str], likeness: float) -> list[str]:
    """Returns the known name that is most like another one, if one is so much like it, 0 to 1."""
    import difflib  # here: only a mistake needs it

    return difflib.get_close_matches(name, known, 1, likeness)


def _parsed(text: str, source: str) -> Any:
    try:
        loaded = yaml.load(text, Loader=_Loader)
        repr(loaded)  # a number of very many digits can be read, as 0x…, and not be written
        return loaded
    # Its constructors end in any of these: at a date like 2020-13-45, at `!!bool x`.
    except (yaml.YAMLError, *DAMAGES) as error:
        raise ConfigError(f"{source}: not YAML: {error}") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML's safe loader, to which `1e-3` is a number, and a key that is given twice an error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0  # read so far
        self._sizes: dict[int, int] = {}  # how many values a node stands for, by its id

    def compose_node(self, parent: Any, index: Any) -> Any:
        before = self._values
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        # One that is in itself has no size yet.
        self._values += self._sizes.get(id(node), _MOST_VALUES) if is_alias else 1
        self._sizes[id(node)] = self._values - before
        if self._values > _MOST_VALUES:
            self._refuse(f"more than {_MOST_VALUES} values, with what aliases stand for", node)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = Counter(repr(key.value) for key, _ in node.value)
        if twice := [name for name, count in names.items() if count > 1]:
            self._refuse(f"key {twice[0]} is given twice", node)
        return super().construct_mapping(node, deep)

    def _refuse(self, what: str, node: Any) -> None:
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes a text that the loader would read as a number; writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))

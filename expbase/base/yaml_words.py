"""YAML whose scalars know how they were written. A leaf over PyYAML.

YAML 1.1, which PyYAML follows, takes `010` for 8, `1:30` for 90, `no` for false, `2020-01-01` for a
date. Only the default value of a key tells what was meant; so each scalar without quotes comes as a
Word.

    tree = parse_words("id: 010")       # {"id": Word("010")}
    values_of(tree)               # {"id": "010"}: where nothing tells more
    number_in("010")              # 10
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml

BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_FORMS = {form for word in BOOLEANS for form in (word, word.capitalize(), word.upper())}
_NOTHING = ("", "~", "null", "Null", "NULL")
# No leading zero, no sixtieths.
_NUMBER = re.compile(
    r"([-+]?(0|[1-9]\d*|[1-9]\d{0,2}(_\d{3})+|0x[0-9a-fA-F]+|0b[01]+|\d+\.\d*|\.\d+"
    r"|(\d+\.?\d*|\.\d+)[eE][-+]?\d+|\.(inf|Inf|INF))|\.(nan|NaN|NAN))$",
    re.ASCII,
)
_PADDED = re.compile(r"0\d+", re.ASCII)
# The most values that aliases (`*name`) stand for in a text: a few lines of aliases of aliases may
# stand for more than any memory holds.
_MOST_VALUES = 20_000


class Word:
    """A scalar without quotes: its text, and its value where nothing tells what is expected."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.value: Any = text
        if text in _NOTHING:
            self.value = None
        elif text in _FORMS:
            self.value = BOOLEANS[text.lower()]
        elif _NUMBER.match(text):
            self.value = number_in(text)

    def __repr__(self) -> str:
        return repr(self.value)


def number_in(text: str) -> int | float:
    """Returns the number that a person reads in a text: `010` is ten.

    Raises:
        ValueError: The text is no number.
    """
    for read in (int, functools.partial(int, base=0)):  # the second one reads 0x10
        with contextlib.suppress(ValueError):
            return read(text)
    return float(re.sub(r"^([-+]?)\.(?=(inf|nan)$)", r"\1", text, flags=re.IGNORECASE))


def values_of(tree: Any) -> Any:
    """Returns a parsed tree with the value of each Word in the place of the Word."""
    if isinstance(tree, Word):
        return tree.value
    if isinstance(tree, Mapping):
        return {key: values_of(item) for key, item in tree.items()}
    if type(tree) is not list:
        return tree
    words = [item.text for item in tree if isinstance(item, Word)]
    # In a list of 08, 09 and 10 the last one is a text, too.
    are_padded = any(_PADDED.fullmatch(text) for text in words)
    return [
        item.text
        if are_padded and isinstance(item, Word) and item.text.isdigit()
        else values_of(item)
        for item in tree
    ]


def parse_words(text: str) -> Any:
    """Returns the dicts, lists and scalars of a YAML text; its keys are texts.

    A scalar without quotes is a Word, one with quotes a text.

    Raises:
        yaml.YAMLError: It is not YAML, gives a key twice, or its aliases stand for too many values.
    """
    return yaml.load(text, Loader=_Loader)


def dump(value: Any) -> str:
    """Returns a value of dicts, lists and scalars as text that `parse_words` reads to the same."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML's safe loader, which returns each plain scalar as a Word, and no key twice."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0  # read so far, with those that aliases stand for
        self._by_aliases = 0  # of these
        self._sizes: dict[int, int] = {}  # how many values a node stands for, by its id

    def compose_node(self, parent: Any, index: Any) -> Any:
        before = self._values
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        # An alias within the node that it names has no size yet.
        size = self._sizes.get(id(node), _MOST_VALUES + 1) if is_alias else 1
        self._values += size
        self._by_aliases += size * is_alias
        self._sizes[id(node)] = self._values - before
        if self._by_aliases > _MOST_VALUES:
            self._refuse(f"more than {_MOST_VALUES} values that aliases stand for", node)
        return node

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        return _PLAIN if kind is yaml.ScalarNode and implicit[0] and tag != _MERGE else tag

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = Counter(repr(key.value) for key, _ in node.value)
        if twice := [name for name, count in names.items() if count > 1]:
            self._refuse(f"key {twice[0]} is given twice", node)
        mapping = super().construct_mapping(node, deep)
        return {key.text if isinstance(key, Word) else key: value for key, value in mapping.items()}

    def _refuse(self, what: str, node: Any) -> None:
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes a text that the loader would read as a number; writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_MERGE = "tag:yaml.org,2002:merge"  # of the key `<<`
_PLAIN = "!plain"
_Loader.add_constructor(_PLAIN, lambda _, node: Word(node.value))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))

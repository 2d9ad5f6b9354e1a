"""Lines of the running interpreter's standard library, with what `tokenize` and `ast` call them.

Left out, so that the answers are neither undecidable nor trivial:

- lines that no statement begins: blank ones, comments, `else:`, decorators, and what continues a
  statement or a docstring, which nobody can tell without the lines before it;
- indentation, a quarter of all characters;
- repetitions: what stands in one part of the data never stands in another, too.
"""

import ast
import io
import itertools
import keyword
import sysconfig
import tokenize
from pathlib import Path

import numpy as np
from paddle.static import InputSpec

from expbase.extras.components import Reader

CHARACTERS = "\0" + "".join(map(chr, range(32, 127))) + "\N{REPLACEMENT CHARACTER}"
PADDING, OTHER = 0, len(CHARACTERS) - 1  # the last one stands for every other character
TAGS = "space name keyword number string op comment".split()
KINDS = "Assign AugAssign Expr Return If For While With Raise Assert Import ImportFrom".split()
KINDS += ["FunctionDef", "ClassDef", "other"]
LENGTH = 64  # of a line, in characters; one in twenty is longer, and cut
NO_TAG = -1  # of the padding
# Not installed everywhere, or tables more than text.
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages"}

CODES_SPEC = InputSpec([-1, LENGTH], "int64", "codes")
TAGS_SPEC = InputSpec([-1, LENGTH], "int64", "tags")
KIND_SPEC = InputSpec([-1], "int64", "kind")


class Lines(Reader):
    """A line's character codes, the tag of each character, and the kind of its statement."""

    outputs_attr = (CODES_SPEC, TAGS_SPEC, KIND_SPEC)

    def __init__(self, lines, phase="train"):
        super().__init__(phase)
        self.codes = np.full([len(lines), LENGTH], PADDING)
        self.tags = np.full([len(lines), LENGTH], NO_TAG)
        self.kinds = np.array([kind for _, kind in lines.values()])
        numbers = {character: number for number, character in enumerate(CHARACTERS)}
        for row, (text, (tags, _)) in enumerate(lines.items()):
            codes = [numbers.get(character, OTHER) for character in text[:LENGTH]]
            self.codes[row, : len(codes)] = codes
            self.tags[row, : len(codes)] = tags[:LENGTH]

    def __len__(self):
        return len(self.kinds)

    def sample(self, index):
        return {"codes": self.codes[index], "tags": self.tags[index], "kind": self.kinds[index]}


def split_library(num_files):
    """Readers for training, validation and test, of 8, 1 and 1 tenth of so many files."""
    files, tenth = choose_files(num_files), num_files // 10
    readers, seen = [], set()
    for part in files[2 * tenth :], files[:tenth], files[tenth : 2 * tenth]:
        found = itertools.chain.from_iterable(map(read_lines, part))
        lines = {text: (tags, kind) for text, tags, kind in found if text not in seen}
        seen |= lines.keys()
        readers.append(Lines(lines))
    return readers


def choose_files(num_files):
    """Some files of the library, which depend on no order but that of names."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in folder.rglob("*.py") if not SKIPPED & {*p.relative_to(folder).parts})
    paths = [path for path in paths if 1_000 < path.stat().st_size < 60_000]
    return [paths[i] for i in np.random.RandomState(0).permutation(len(paths))[:num_files]]


def read_lines(path):
    """Text, tags and kind of each line of a file that a statement begins."""
    with tokenize.open(path) as file:
        source = file.read()
    lines = source.split("\n")
    tags = [np.full(len(line), TAGS.index("space")) for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (row, start), (last_row, end) = token.start, token.end
        if row <= len(lines):  # the end of the file is a token, too
            tags[row - 1][start : end if row == last_row else None] = tag_of(token)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            line, name = lines[node.lineno - 1], type(node).__name__
            indent = len(line) - len(line.lstrip())
            if node.col_offset == indent:  # else something before it begins the line
                kind = KINDS.index(name if name in KINDS else "other")
                yield line[indent:], tags[node.lineno - 1][indent:], kind


def tag_of(token):
    name = tokenize.tok_name[token.type].lower()
    if name == "name" and keyword.iskeyword(token.string):
        name = "keyword"
    elif "string" in name:  # fstring_start and others since Python 3.12
        name = "string"
    return TAGS.index(name if name in TAGS else "space")

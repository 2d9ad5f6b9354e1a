"""docs/publish.md: what is sent is checked, and made again in one part, by what the page says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import forks
import pytest
from pages import PAIRS, SCRIPT, TEXT, blocks, code_of
from tiny import metrics

SEND, READ, BY_HAND = blocks("publish", "bash")
BOUND, LINE, NAMED, REPRODUCED = blocks("publish", "text")
FORM = re.compile("[0-9a-f]{64}")


def shape(said: str) -> str:
    """What is said, without digests and numbers that differ between processors."""
    text = re.sub(r"each of its \d+ lines|\(step-\d+, \d+ logged", "N", FORM.sub("D", said))
    return re.sub(r"iterations \d+ to \d+", "iterations", text)


def do(command: str, folder: Path, *, code: int = 0) -> str:
    """Gives a command of the page in a folder; returns what it says."""
    if not command.startswith("python"):
        words = ["sh", "-c", command]
    else:
        words = [sys.executable, *shlex.split(command)[1:]]
    done = forks.run(words, cwd=folder, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_who_has_what_the_page_names_can_check_the_run_and_make_a_part_again(
    tmp_path: Path,
) -> None:
    made, sent = tmp_path / "made", tmp_path / "sent"
    for folder in (made, sent):
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
    train, check = SEND.splitlines()
    do(f"{train} --device cpu", made)
    said = do(check, made)
    assert shape(said) == shape(BOUND)
    (digest,) = FORM.findall(said)
    log = (made / "runs/line/worker_0.log").read_text().splitlines()
    assert log[-3].endswith(f" digest      {digest}")  # docs: the log ends with it

    (names,) = re.findall(r"^- Send (.*?)\.\s+The logs", TEXT["publish"], re.DOTALL | re.MULTILINE)
    for name in re.findall("`(.+?)`", names):
        source, target = made / "runs/line" / name, sent / "runs/line" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    look, again = (command.replace(" D", f" {digest}") for command in READ.splitlines())
    assert do(look, sent) == said
    assert shape(do(again, sent)) == shape(REPRODUCED)
    by_hand = do(BY_HAND, sent).splitlines()
    assert by_hand[0].split() == [digest, "-"]
    bound = (sent / "runs/line/digest.txt").read_text()
    path = "checkpoint step-00001000 model.safetensors"
    assert f"{path} {by_hand[1].split()[0]}\n" in bound

    run = sent / "runs/line"
    shutil.copy(
        run / "checkpoints/step-00000600/model.safetensors", run / "checkpoints/step-00000400"
    )
    first = str(metrics(run)[0]["train/loss"])
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace(first, "0.5", 1))
    lines = shape(do(look, sent, code=1)).splitlines()
    assert sorted(lines) == sorted(shape(NAMED).splitlines())
    assert do(again, sent, code=1).startswith(f"NOT REPRODUCED: not the files of digest {digest}: ")


@pytest.mark.parametrize("page", PAIRS["publish"])
def test_one_digest_stands_in_all_examples_of_the_page(page: Path) -> None:
    assert len({*FORM.findall("".join(code_of(page.read_text(), "text")))}) == 1
    assert "digest of the run" in LINE

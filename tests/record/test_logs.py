"""The text log: its file, its echo on the terminal, the lines of before there is a file."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from pathlib import Path

import pytest
from paddle.distributed.utils import log_utils as paddle_logs
from tiny import Tiny, trained

from expbase.record.logs import close_log, early_log, open_log


def opened(path: Path, *, echo: bool) -> logging.Logger:
    logger = early_log()
    open_log(logger, path, echo=echo)
    return logger


def test_two_logs_do_not_write_into_each_other(tmp_path: Path) -> None:
    one, two = (opened(tmp_path / name, echo=False) for name in ("one", "two"))
    one.info("first")
    two.warning("second")
    close_log(one)
    close_log(two)
    assert (tmp_path / "one").read_text().endswith(" first\n")
    assert (tmp_path / "two").read_text().endswith(" WARNING: second\n")
    assert {len((tmp_path / name).read_text().splitlines()) for name in ("one", "two")} == {1}


def test_a_log_goes_on_in_its_file(tmp_path: Path) -> None:
    for text in ("before", "after"):
        logger = opened(tmp_path / "log", echo=False)
        logger.info(text)
        close_log(logger)
    assert [words.split()[-1] for words in (tmp_path / "log").read_text().splitlines()] == [
        "before", "after",
    ]  # fmt: skip


def test_closing_a_log_twice_is_legal_and_later_lines_are_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = opened(tmp_path / "log", echo=True)
    close_log(logger)
    close_log(logger)
    logger.error("late")
    assert (tmp_path / "log").read_text() == ""
    assert capsys.readouterr().err == ""


def test_lines_of_before_the_file_was_there_are_its_first_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = early_log()
    logger.error("early")
    assert capsys.readouterr().err == ""
    open_log(logger, tmp_path / "log", echo=True)
    logger.info("late")
    close_log(logger)
    for text in ((tmp_path / "log").read_text(), capsys.readouterr().err):
        assert re.findall(r" (\w+)$", text, re.MULTILINE) == ["early", "late"]


def test_an_early_line_that_no_log_takes_is_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = early_log()
    logger.error("before")
    open_log(logger, None, echo=False)
    logger.error("now")
    close_log(logger)
    assert capsys.readouterr().err == ""


def test_each_line_has_its_time(tmp_path: Path) -> None:
    logger = opened(tmp_path / "log", echo=False)
    for created in (0.5, 0.9, 1.1):
        record = logger.makeRecord("expbase", logging.INFO, "", 0, "text", (), None)
        record.created = created
        logger.handle(record)
    close_log(logger)
    seconds = [line.split()[1][-2:] for line in (tmp_path / "log").read_text().splitlines()]
    assert seconds == ["00", "00", "01"]


def test_pythons_root_logger_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = list(logging.root.handlers)
    logger = opened(tmp_path / "log", echo=False)
    logger.error("mine")
    assert logging.root.handlers == handlers
    assert caplog.records == []
    close_log(logger)


def test_a_traceback_stands_in_the_file_and_not_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = opened(tmp_path / "log", echo=True)
    users = io.StringIO()
    logger.addHandler(logging.StreamHandler(users))
    try:
        raise RuntimeError("the reason")
    except RuntimeError:
        logger.exception("it failed")
    close_log(logger)
    for full in ((tmp_path / "log").read_text(), users.getvalue()):
        assert "RuntimeError: the reason" in full
    shown = capsys.readouterr().err
    assert "ERROR: it failed" in shown
    assert "Traceback" not in shown


def test_a_run_whose_standard_error_was_closed_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as Python does for `2>&-`
    assert trained(Tiny, tmp_path / "run", max_iteration=2).finished
    assert "FINISHED" in (tmp_path / "run/worker_0.log").read_text()


def test_paddles_handler_leaves_out_what_a_handler_of_the_authors_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, bare = logging.getLogger("author.own"), logging.getLogger("author.bare")
    # As the one at the root logger, which pytest has handlers at, too.
    [paddles] = paddle_logs.get_logger(logging.INFO, "author.paddle").handlers
    logging.getLogger().addHandler(paddles)
    handler = logging.StreamHandler(sys.stderr)

    class Author(Tiny):
        def on_train_begin(self) -> None:
            own.warning("with a handler")
            bare.warning("without one")

    own.addHandler(handler)
    try:
        trained(Author, tmp_path)
        own.warning("afterwards")
    finally:
        own.removeHandler(handler)
        logging.getLogger().removeHandler(paddles)
    printed = capsys.readouterr().err
    counts = [printed.count(text) for text in ("with a handler", "without one", "afterwards")]
    assert counts == [1, 1, 2]


def test_the_warning_of_batch_norm_is_not_repeated(tmp_path: Path) -> None:
    class Resetting(Tiny):
        def on_train_batch_end(self) -> None:
            warnings.warn("the author's", stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = [*warnings.filters]
        trained(Resetting, tmp_path, max_iteration=2)
        assert [*warnings.filters] == before
    said = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert said == ["the author's"] * 2

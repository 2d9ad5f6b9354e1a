"""A name that is not known is answered with the one that is most like it, or with all."""

from __future__ import annotations

from expbase.base.did_you_mean import did_you_mean


def test_the_name_that_is_most_like_it_is_shown_as_it_is_to_be_written() -> None:
    assert did_you_mean("modle", ["model", "optim"]) == " Did you mean 'model'?"
    assert did_you_mean("smok", ["smoke"], shown="--{}".format) == " Did you mean --smoke?"


def test_the_last_part_alone_finds_a_key_of_another_section() -> None:
    assert did_you_mean("lr", ["optim.lr", "optim.lrs"]) == " Did you mean 'optim.lr'?"


def test_a_name_that_is_like_none_is_answered_with_all_or_with_what_else_there_is() -> None:
    assert did_you_mean("zzz", ["model", 0]) == " Expected one of model, 0."
    assert did_you_mean("zzz", ["model"], otherwise="") == ""
    assert did_you_mean("modle", ["model"], 0.9, otherwise=" none") == " none"

"""A name that is not known is answered with the one that is most like it, or with all."""

from __future__ import annotations

from expbase.base.did_you_mean import did_you_mean


def test_the_name_that_is_most_like_it_is_shown_as_it_is_to_be_written() -> None:
    assert did_you_mean("modle", ["model", "optim"]) == " Did you mean 'model'?"
    assert did_you_mean("smok", ["smoke"], shown="--{}".format) == " Did you mean --smoke?"


def test_the_last_part_alone_finds_a_key_of_another_section() -> None:
    assert did_you_mean("lr", ["optim.lr", "optim.lrs"]) == " Did you mean 'optim.lr'?"


def test_a_key_of_a_section_is_compared_with_the_keys_of_it_alone() -> None:
    keys = ["model.rates", "optim.lr", "optim.weight_decay", "optim.warmup"]
    assert did_you_mean("optim.lrr", keys) == " Did you mean 'optim.lr'?"
    of_section = " Expected one of optim.lr, optim.weight_decay, optim.warmup."
    assert did_you_mean("optim.learning_rate", keys) == of_section
    assert did_you_mean("optim.rates_", keys) == of_section
    assert did_you_mean("optm.warmpu", keys) == " Did you mean 'optim.warmup'?"
    assert did_you_mean("rate_of_lr", ["rate_decay"]) == " Expected one of rate_decay."


def test_a_name_that_is_like_none_is_answered_with_all_or_with_what_else_there_is() -> None:
    assert did_you_mean("zzz", ["model", 0]) == " Expected one of model, 0."
    assert did_you_mean("zzz", ["model"], otherwise="") == ""
    assert did_you_mean("modle", ["model"], 0.9, otherwise=" none") == " none"

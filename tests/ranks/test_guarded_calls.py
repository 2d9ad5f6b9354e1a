"""Each method of the face that rank 0 alone calls: an answer in seconds, with the place, or none.

Without one gloo ends the run after 30 s, by an error or a signal that name nothing, with a code for
which --restarts starts it again.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny import run_script

from expbase import ExperimentBase

SCRIPT = """
import paddle
from tiny import Tiny
from expbase import main
from expbase.engine import stop
from expbase.ranks import collectives

collectives._LONG_WAIT_SECONDS = 0.5
stop._ASK_SECONDS = 1e9  # so the ranks ask each other at the iterations 0, 1, 3, 7, 15

class Guarded(Tiny):
    def call(self):
        if self.rank == 0:
            {call}

    def setup_model(self):
        super().setup_model()
        self.extra = [1]
        self.input_spec = [paddle.static.InputSpec([None, 4])]
        "{place}" == "setup_model" and self.call()

    def on_train_begin(self):
        "{place}" == "on_train_begin" and self.call()

    def train_batch(self):
        self.iteration == 4 and "{place}" == "before" and self.call()
        super().train_batch()
        str(self.iteration) == "{place}" and self.call()

    def valid(self):
        "{place}" == "valid" and self.call()
        return super().valid()

    def on_train_end(self):
        "{place}" == "on_train_end" and self.call()

if __name__ == "__main__":
    main(Guarded)
"""


class Case(NamedTuple):
    """What rank 0 alone calls, and what is said of it; "": nothing, since it is for one rank."""

    call: str
    said: str
    places: tuple[str, ...] = ("3", "4")  # at the end of which the ranks ask each other, and do not


CASES = {
    "save": Case("self.save()", "self.save()", ("3", "4", "on_train_begin")),
    "evaluate": Case("self.evaluate()", "self.evaluate()", ("3", "4", "on_train_end")),
    "stop": Case("self.stop(on_all_ranks=True)", "self.stop()"),
    "average": Case("self.average({'a': 1.0}, 1)", "self.average()"),
    "gather": Case("self.gather(1)", "self.gather()", ("3", "4", "valid")),
    "save_model": Case("self.save_model(self.output_dir / 'm.safetensors')", "save_model"),
    "export": Case("self.export(self.output_dir / 'm')", "export"),
    "load_model": Case("self.load_model('none.safetensors')", "load_model"),
    "load_checkpoint": Case("self.load_checkpoint('last')", "load_checkpoint", ("on_train_end",)),
    "resume_or_load": Case("self.resume_or_load()", "the digests of what the run begins from"),
    "data_parallel": Case(
        "self.data_parallel(paddle.nn.Linear(2, 2))", "self.data_parallel()", ("setup_model",)
    ),
}
# They are done by one rank alone, and others need not know.
FOR_ONE = {
    *("stop", "log", "unwrap", "valid_batches", "register_stateful", "exclude_from_state"),
    *("read_batch", "micro_batches", "new_epoch", "backward", "step_optimizers"),
}
# They are called by the loop, by setup or by a script, or are the user's, and say so.
NOT_THERE = {
    *("setup_dataloader", "setup_model", "train_batch", "valid", "setup", "run", "close", "train"),
    *("init_parallel", "setup_output_dir", "dump_config", "setup_visualizer", "setup_logger"),
    *("setup_checkpointer", "check_setup", "going_on", "end_iteration", "default_config"),
}
QUICK = {("evaluate", "4")}


def answer(folder: Path, call: str, place: str, restarts: int = 1) -> tuple[int, str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(call=call, place=place))
    words = ["--output", str(folder / "run"), "--nprocs", "2", "--device", "cpu"]
    words += ["--restarts", str(restarts), "training.max_iteration=9", "training.save_interval=0"]
    words += ["training.valid_interval=3" if place == "valid" else "training.valid_interval=0"]
    result = run_script(script, *words)
    return result.returncode, result.stderr


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=[] if (name, place) in QUICK else pytest.mark.long)
        for name, case in CASES.items()
        for place in case.places
    ],
)
def test_a_call_by_rank_0_alone_is_answered_by_its_place_and_not_started_again(
    tmp_path: Path, name: str, place: str
) -> None:
    code, said = answer(tmp_path, CASES[name].call, place)
    assert code == 78, said
    start = "the ranks wait for each other at different places: rank 0 at "
    assert re.search(
        re.escape(start + CASES[name].said) + "(,| in iteration 4, rank 1 in iter)", said
    )
    assert "each of them, and as often: look for `if self.rank == 0` or a return before it" in said
    assert "the same command continues" not in said
    assert "RESTART" not in said


@pytest.mark.long
def test_where_gloo_ends_the_wait_first_the_place_is_named(tmp_path: Path) -> None:
    """Before the backward of the same iteration, in which rank 1 waits for rank 0."""
    code, said = answer(tmp_path, "self.gather(1)", "before", restarts=0)
    assert code not in (0, 78)
    text = "unless this rank alone makes the call at which it waited, self.gather(): look for `if "
    assert text in said


def test_the_table_has_each_method_of_the_face() -> None:
    methods = {name for name in vars(ExperimentBase) if not name.startswith("_")}
    methods = {name for name in methods if callable(getattr(ExperimentBase, name))}
    assert methods == CASES.keys() | FOR_ONE | NOT_THERE


@pytest.mark.long
@pytest.mark.parametrize(
    "call", ["self.stop()", "self.log(a=1)", "self.unwrap(self.model)", "[*self.valid_batches()]"]
)
def test_what_is_for_one_rank_needs_no_other(tmp_path: Path, call: str) -> None:
    code, said = answer(tmp_path, call, "4")
    assert code == 0, said

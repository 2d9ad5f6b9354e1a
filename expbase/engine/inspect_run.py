"""To look at a checkpoint and not train on: load_checkpoint, --evaluate, --export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expbase.base.errors import RuntimeMistake
from expbase.base.json_lines import json_value
from expbase.base.terminal import show
from expbase.checkpoint import layout
from expbase.engine.run import Run
from expbase.engine.run_states import Life


def load_checkpoint(run: Run, which: str | int, of_run: str | Path | None) -> None:
    """Loads models, optimizers and values of a checkpoint, to look at them."""
    by_hand = run.life is Life.RESTORED and not run.loop.is_over
    if by_hand or run.life is Life.TRAINING:
        raise RuntimeMistake(
            "load_checkpoint: called before the end of training, which would go on with other "
            "weights; expected it after train(), for example in on_train_end."
        )
    directory = run.start.output_dir if of_run is None else Path(of_run)
    position = run.checkpointer.look_at(directory, str(which))
    run.events.fire("inspect", directory, position[0])
    if run.life is Life.READY:  # there is no other position in training
        run.loop.place_at(*position)


def evaluate_or_export(run: Run) -> None:
    """Does --evaluate or --export, and prints what was found as one line of JSON."""
    with run.closing():
        experiment = run.experiment
        experiment.load_checkpoint(run.start.options.inspected or "")
        found: dict[str, Any] = {"iteration": run.loop.iteration, "epoch": run.loop.epoch}
        if run.start.options.export in (None, False):
            found["loader"] = "valid_loader" if experiment.test_loader is None else "test_loader"
            results = experiment.evaluate(experiment.test_loader)
            found = {name: json_value(value) for name, value in results.items()} | found
        else:
            name = layout.name_of(run.loop.iteration)
            path = Path("export", name, "model")
            experiment.export(run.start.output_dir / path)
            found["exported"] = str(run.start.output / path)
        if run.start.rank == 0:
            show(json.dumps(found))

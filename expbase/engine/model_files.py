"""Model files: what a user does with weights by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expbase.checkpoint import rank_state, weights
from expbase.checkpoint.storage import CheckpointError
from expbase.config import ConfigError
from expbase.engine.run import Run
from expbase.ranks import collectives
from expbase.state.objects import unwrap


def save(run: Run, path: str | Path, layer: Any) -> None:
    """Writes the weights of a model, on rank 0, whole or not at all."""
    run.directory.check()
    run.events.fire("on_save_model")
    layer = unwrap(run.experiment.model if layer is None else layer)
    collectives.on_rank_zero(lambda: weights.write_weights(Path(path), layer), "save_model")


def load(
    run: Run, path: str | Path, into: str | None, rename: weights.Rename | None, *, partial: bool
) -> None:
    """Loads weights, and nothing else; what fitted goes into the log."""
    run.events.fire("on_load_model")
    place, found = _on_all_ranks(Path(path))
    if rename is not None:
        found = {model: weights.renamed(of_model, rename) for model, of_model in found.items()}
    texts = weights.load(found, run.state.saved().layers, into, partial=partial)
    for name, text in texts.items():
        run.logger.info("loaded %s from %s: %s", name, place, text)


def _on_all_ranks(path: Path) -> tuple[Path | None, dict[str, weights.Weights]]:
    """Where rank 0 finds weights, and these; whoever finds the same ones at the path reads them."""
    found: dict[str, weights.Weights] = {}

    def read() -> Path:
        place = weights.find_weights(path)
        found.update(weights.read_weights(place))
        return place

    place = collectives.on_rank_zero(read, "load_model")
    if collectives.rank():
        with contextlib.suppress(weights.WeightsError, CheckpointError):
            read()
    collectives.barrier("load_model")
    return place, rank_state.as_on_rank_zero(found)


def export(run: Run, path: str | Path, spec: Sequence[Any] | None, layer: Any) -> None:
    """Writes a model for inference, by paddle.jit.save, on rank 0."""
    experiment = run.experiment
    layer = unwrap(experiment.model if layer is None else layer)
    spec = getattr(experiment, "input_spec", None) if spec is None else spec
    if spec is None:
        raise ConfigError(
            "export: no input_spec given; expected a list with a paddle.static.InputSpec for "
            "each input of the model, here or as self.input_spec."
        )
    run.directory.check()
    with run.evaluation.begin("predict", run.iteration, layers=[layer]):
        collectives.on_rank_zero(lambda: weights.export_model(Path(path), layer, spec), "export")
    run.logger.info("exported %s", path)

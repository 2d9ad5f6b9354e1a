"""Model files: what a user does with weights by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expbase.config import ConfigError
from expbase.ranks import world
from expbase.run import Run
from expbase.state.objects import unwrap
from expbase.state.weights import export_model, read_weights, write_weights
from expbase.state.weights import load as load_weights


def save(run: Run, path: str | Path, layer: Any) -> None:
    """Writes the weights of a model, on rank 0, whole or not at all."""
    run.events.fire("on_save_model")
    layer = unwrap(run.experiment.model if layer is None else layer)
    world.on_rank_zero(lambda: write_weights(Path(path), layer), "save_model")


def load(run: Run, path: str | Path, into: str | None, *, partial: bool) -> None:
    """Loads weights, and nothing else; what fitted goes into the log."""
    run.events.fire("on_load_model")
    found = world.on_rank_zero(lambda: read_weights(Path(path)), "load_model") or {}
    texts = load_weights(found, run.state.saved().layers, into, partial=partial)
    for name, text in texts.items():
        run.logger.info("loaded %s from %s: %s", name, path, text)


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
    with run.evaluation.begin("predict", run.iteration, layers=[layer]):
        world.on_rank_zero(lambda: export_model(Path(path), layer, spec), "export")
    run.logger.info("exported %s", path)

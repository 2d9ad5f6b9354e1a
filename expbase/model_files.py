"""Model files: what a user does with weights by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expbase import distributed
from expbase.config import ConfigError
from expbase.evaluation import Evaluation
from expbase.state.weights import export_model, read_weights, write_weights
from expbase.state.weights import load as load_weights


class ModelFiles(Evaluation):
    """Saving, loading and exporting models."""

    def save_model(self, path: str | Path, layer: Any = None) -> None:
        """Writes the weights of a model, on rank 0, whole or not at all.

        Args:
            path: Ends in `.safetensors`, or in `.pdparams` for paddle.load.
            layer: self.model by default.
        """
        self.fire("on_save_model")
        layer = self.unwrap(self.model if layer is None else layer)
        distributed.on_rank_zero(lambda: write_weights(Path(path), layer), "save_model")

    def load_model(
        self, path: str | Path, *, into: str | None = None, partial: bool = False
    ) -> None:
        """Loads weights, and nothing else; what fitted goes into the log.

        Args:
            path: A checkpoint, a run, a `.safetensors` or a `.pdparams`. Nothing in it is run.
            into: The name of the layer among the attributes; needed if the file holds one model
                and there are several layers, none of them called `model`. Of a checkpoint without
                that name its `model` is taken.
            partial: Whether missing, additional and differently shaped weights are allowed.

        Raises:
            WeightsError: It cannot be read or does not fit; nothing was changed.
        """
        self.fire("on_load_model")
        found = distributed.on_rank_zero(lambda: read_weights(Path(path)), "load_model") or {}
        texts = load_weights(found, self._saved_objects().layers, into, partial=partial)
        for name, text in texts.items():
            self.logger.info("loaded %s from %s: %s", name, path, text)

    def export(
        self, path: str | Path, input_spec: Sequence[Any] | None = None, layer: Any = None
    ) -> None:
        """Writes a model for inference, by paddle.jit.save, on rank 0.

        Args:
            path: Without a suffix: files of this name with paddle's own suffixes are written.
            input_spec: A paddle.static.InputSpec for each input of its forward; self.input_spec
                by default.
            layer: self.model by default.

        Raises:
            ConfigError: There is no input_spec.
        """
        layer = self.unwrap(self.model if layer is None else layer)
        spec = getattr(self, "input_spec", None) if input_spec is None else input_spec
        if spec is None:
            raise ConfigError(
                "export: no input_spec given; expected a list with a paddle.static.InputSpec for "
                "each input of the model, here or as self.input_spec."
            )
        with self._in_phase("predict", layers=[layer]):
            distributed.on_rank_zero(lambda: export_model(Path(path), layer, spec), "export")
        self.logger.info("exported %s", path)

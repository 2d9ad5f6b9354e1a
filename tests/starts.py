"""The state of an object with attributes, carried from one start to the next, as a run does it."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import paddle

from expbase.base.arrays import Array, parse, serialize
from expbase.base.json_values import Decoder, Encoder
from expbase.doctor.doctor_file import FILE
from expbase.doctor.unsaved_changes import Audit
from expbase.state.parts import StatefulObjects, found_in
from expbase.state.user_state import UserState
from expbase.state.walk import Walk


class Start:
    """Attributes that setup has made, and what `saved` returned put back into them.

    Args:
        attributes: What setup makes.
        saved: What an earlier start has saved.
        during: What on_train_begin does.
        exclude: Names of what is no state.
        register: Names of what is state in any case.
    """

    def __init__(
        self,
        attributes: dict[str, Any],
        saved: dict[str, Any] | None = None,
        *,
        during: Callable[[Any], object] = id,
        exclude: Sequence[str] = (),
        register: Sequence[str] = (),
    ) -> None:
        self.own: Any = SimpleNamespace(**attributes)
        self._folder = Path(mkdtemp())
        weakref.finalize(self, shutil.rmtree, self._folder)
        self._guests: dict[str, Callable[[], object]] = {}
        self.warned: list[str] = []
        self.said: list[str] = []
        self.state = UserState(self.own, self.warned.append, self.said.append)
        self.state.reach.exclude(tuple(exclude))
        self.state.reach.register(tuple(register))
        self.state.note_setup()
        self._let_the_doctor_in(saved)
        self._guests["ready"]()
        if saved:
            found, values = self.state.saved(), self.state.values
            assert self.problems(saved) == []
            assert found.load_state_dict((_tensors(saved), saved["parts"])) == []
            assert values.load_state_dict(saved["values"]) == []
            self.state.told.load_state_dict(saved["told"])
        during(self.own)
        self.lost, self.lines = self.state.begin()
        warned, said = [*self.warned], [*self.said]
        self._guests["begin"]()
        exact = "not exact: "
        lost = [line for line in self.warned[len(warned) :] if line.startswith(exact)]
        self.lost += [line.removeprefix(exact) for line in lost]
        self.lines += [line for line in self.said[len(said) :] if line not in self.lines]
        self.warned[:] = [line for line in self.warned if line not in lost]
        self.said[:] = said

    def _let_the_doctor_in(self, saved: dict[str, Any] | None) -> None:
        """Lets it look at every save, as at a run whose saves are few."""
        run = self._folder
        if saved:
            (run / FILE).write_text(saved["doctor"])
        at = len(json.loads(saved["doctor"])["looks"]) if saved else 0
        self.visited: Any = SimpleNamespace(
            rank=0,
            iteration=at,
            output_dir=run,
            logger=SimpleNamespace(
                warning=lambda _, text: self.warned.append(text),
                info=lambda _, text: self.said.append(text),
            ),
        )
        internals: Any = SimpleNamespace(
            state=self.state,
            restored=run / "checkpoints/step" if saved else None,
            is_ending=True,
            listen=self._guests.__setitem__,
        )
        Audit(self.visited, internals)

    def problems(self, saved: dict[str, Any]) -> list[str]:
        """What keeps it from being restored."""
        of_parts = self.state.saved().problems((_tensors(saved), saved["parts"]))
        return of_parts + self.state.values.problems(saved["values"])

    def saved(self) -> dict[str, Any]:
        """What a checkpoint would hold, taken through JSON and files of tensors."""
        tensors, of_parts = self.state.saved(anew=True).state_dict()
        values = self.state.values.state_dict()
        self.visited.iteration += 1
        self._guests["capture"]()
        doctor = (self._folder / FILE).read_text()
        held = {
            "parts": of_parts,
            "values": values,
            "doctor": doctor,
            "told": self.state.told.state_dict(),
        }
        return through_json(held) | {
            "files": {n: to_bytes(by_key) for n, by_key in tensors.items()}
        }

    def paths(self) -> list[str]:
        """The paths of the values that a checkpoint would hold."""
        return [path for path in self.state.values.state_dict() if not path.startswith("@")]


def _tensors(saved: dict[str, Any]) -> dict[str, dict[str, Array]]:
    return {name: parse(data) for name, data in saved["files"].items()}


def found_among(
    attributes: Mapping[str, Any], excluded: Mapping[str, Any] | None = None
) -> StatefulObjects:
    """The layers, optimizers and other objects with a state among attributes."""
    return found_in(Walk(None, attributes, excluded))


def layer_and_optimizer(*, wrapped: bool) -> StatefulObjects:
    """A layer of two parameters, in a wrapper or not, and its optimizer."""
    layer = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.Adam(parameters=layer.parameters())
    found = found_among({"model": layer, "optimizer": optimizer})
    return StatefulObjects(found.layers, found.optimizers, parallel={0: layer} if wrapped else {})


def to_bytes(arrays: dict[str, Array]) -> bytes:
    """A file of tensors."""
    return b"".join(map(bytes, serialize(arrays)))


def through_json(value: Any) -> Any:
    """A value that was written and read."""
    arrays: dict[str, Array] = {}
    text = json.dumps(Encoder(arrays).encode(value, "part"))
    return Decoder(parse(to_bytes(arrays))).decode(json.loads(text), "part")

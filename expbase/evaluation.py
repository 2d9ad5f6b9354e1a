"""Evaluating and predicting without a trace: training after it does not feel that it was done.

In a phase other than "train" the models are in eval mode, no gradients are kept, and random states
are the phase's own, derived from (seed, iteration); all is as before afterwards. What an evaluation
is, the user's `valid` and `predict_batch` say.

    evaluation = Evaluation(experiment)
    with evaluation.phase("valid"):
        for batch in evaluation.batches(loader): ...
    results = evaluation.predict(loader)
    with evaluation.undone(): ...                 # changes of the state are taken back, too
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from expbase import distributed
from expbase.data.loaders import Batches, LoaderAdapter, MapStyleLoader
from expbase.meter import Meter, line
from expbase.state import encoding, objects, rng
from expbase.state.arrays import to_numpy
from expbase.visualizer import Visualizer

if TYPE_CHECKING:
    from expbase.experiment import ExperimentBase

_PURPOSES = {"valid": rng.VALID, "sanity": rng.VALID, "predict": rng.PREDICT}


@contextlib.contextmanager
def without_a_trace(
    layers: Iterable[Any], seed: int, parameters: Iterable[Any] = ()
) -> Iterator[None]:
    """Eval mode, no gradients, random states of its own; all as before afterwards.

    Args:
        layers: Whose mode is set; each sublayer gets back the one that it had.
        seed: Of the random states inside.
        parameters: That belong to no layer.
    """
    layers = list(layers)
    sublayers = [s for layer in layers for s in layer.sublayers(include_self=True)]
    gradients = _Gradients([*parameters, *(p for layer in layers for p in layer.parameters())])
    modes = [layer.training for layer in sublayers]
    try:
        with rng.isolated(seed), paddle.no_grad():
            for layer in sublayers:
                layer.training = False
            yield
    finally:
        for layer, mode in zip(sublayers, modes, strict=True):
            layer.training = mode
        gradients.put_back()


class _Gradients:
    """The gradients of parameters: a saliency map, say, leaves some, which training would feel.

    Those that are none or zeros, as after an update, are not copied.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        known = {id(p): p for p in parameters}.values()
        dense = [p for p in known if p.grad_ is not None and not p.grad_.is_selected_rows()]
        flags = (
            paddle.stack([p.grad_.astype("bool").any() for p in dense]).tolist() if dense else []
        )
        self._none = [p for p in known if p.grad_ is None]
        self._zero = [p for p, flag in zip(dense, flags, strict=True) if not flag]
        self._some = [(p, p.grad_.clone()) for p, flag in zip(dense, flags, strict=True) if flag]

    def put_back(self) -> None:
        for parameter in self._none:
            if parameter.grad_ is not None:
                parameter.clear_gradient(False)
        for parameter in self._zero:
            if parameter.grad_ is None:
                parameter.grad = paddle.zeros_like(parameter)
            parameter.clear_gradient(True)
        for parameter, gradient in self._some:
            parameter._set_grad_ivar(gradient)  # a cleared one that is only set or copied to is
            # overwritten by the next backward, not added to


class Evaluation:
    """The phases of one experiment that are not training.

    Attributes:
        meter: Of what is logged meanwhile.
        batches_given: By `batches` and in `predict`, in all.
        limit: Of the batches that one run over a loader gives this rank; None: all.
    """

    def __init__(self, experiment: ExperimentBase) -> None:
        self.meter = Meter()
        self.batches_given = 0
        self._exp = experiment
        self._loader: Any = None  # that `batches` takes by default; None: the validation loader
        self.limit: int | None = None
        self._feeds: dict[int, LoaderAdapter] = {}  # kept: persistent workers serve every run
        self._open: list[Batches] = []

    @contextlib.contextmanager
    def phase(self, name: str, loader: Any = None, layers: Iterable[Any] = ()) -> Iterator[None]:
        """The phase of that name; within a phase that is not training it changes nothing.

        Args:
            name: "valid", "sanity" or "predict".
            loader: What `batches` takes by default instead of the validation loader.
            layers: That do not stand on the experiment.
        """
        exp, before, meter = self._exp, self._loader, self.meter
        self._loader = before if loader is None else loader
        try:
            if exp.phase != "train":
                self.meter = Meter() if name == "predict" else meter
                yield
                return
            purpose = _PURPOSES[name]
            seed = rng.derive(exp.config.training.seed, purpose, exp.iteration, exp.rank)
            exp.phase, self.meter = name, Meter()
            found = objects.find(exp._user_attributes())  # excluded ones, too
            all_layers, bare = [*found.layers.values(), *layers], found.parameters.values()
            drawn_from = objects.generator_states(found)
            try:
                with exp._watch.exclude("validation"), without_a_trace(all_layers, seed, bare):
                    yield
            finally:
                objects.set_generator_states(found, drawn_from)
                exp.phase = "train"
                while self._open:  # one may have been left early
                    self._open.pop().close()
                self._let_go()
        finally:
            self._loader, self.meter = before, meter

    def _let_go(self) -> None:
        """Closes the feeds of loaders that were made for one run alone."""
        standing = {id(value) for value in vars(self._exp).values()}
        for key in [key for key in self._feeds if key not in standing]:
            self._feeds.pop(key).close()

    def batches(self, loader: Any = None) -> Iterator[Any]:
        """This rank's share of a loader's data; of the validation loader by default."""
        return self._limited(self._run_over(loader, rng.VALID))  # it is opened now, not later

    def _limited(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in itertools.islice(batches, self.limit):
            self.batches_given += 1
            yield batch

    def _run_over(self, loader: Any, purpose: int) -> Batches:
        loader = self._loader if loader is None else loader
        batches = self._feed(loader).once(purpose, self._exp.iteration)
        self._open.append(batches)
        return batches

    def _feed(self, loader: Any) -> LoaderAdapter:
        name = "self.valid_loader" if loader is None else "valid_batches"
        loader = self._exp.valid_loader if loader is None else loader
        if id(loader) not in self._feeds:
            self._feeds[id(loader)] = self._exp._feed_of(loader, name)
        return self._feeds[id(loader)]

    def agreed(self, results: Mapping[str, Any] | None) -> dict[str, float]:
        """What valid() gave on rank 0, and what was logged in it, as numbers; on every rank.

        Raises:
            TypeError: It gave something else.
        """
        if results is not None and not isinstance(results, Mapping):
            raise TypeError(f"valid: returned {results!r}; expected numbers by name, or None.")
        given = {**self.meter.means(), **(results or {})}
        numbers = {name: _number(name, value) for name, value in given.items()}
        self.wait()
        return distributed.broadcast_object(numbers)

    def wait(self) -> None:
        """Waits for the other ranks: their shares may take longer than a collective waits."""
        if self._exp.phase != "train":
            distributed.wait_for_all()

    # --- prediction ----------------------------------------------------------------------

    def predict(self, loader: Any) -> list[Any]:
        """The results of predict_batch, one per sample in the order of the data, on every rank.

        Raises:
            ValueError: The loader would leave samples out, or predict_batch did.
        """
        if loader is None:
            raise ValueError("predict: no loader given; expected one, self.test_loader say.")
        feed = self._feed(loader)
        sampler = getattr(loader, "batch_sampler", None)
        if getattr(loader, "drop_last", False) or getattr(sampler, "drop_last", False):
            raise ValueError(
                "predict: the loader has drop_last=True, so some samples would have no result; "
                "expected drop_last=False."
            )
        ready = isinstance(feed, MapStyleLoader) and loader.batch_sampler is None
        numbered: list[tuple[Any, Any]] = []  # where a sample stands, and its result
        run = self._run_over(loader, rng.PREDICT)
        for batch in self._limited(run):
            outputs = self._exp.predict_batch(batch)
            results = split(outputs)
            if run.indices is None or ready:
                index = len(numbered) if run.indices is None else run.indices[0]
                where = [(index, place) for place in range(len(results))]
            else:
                where = [(index, 0) for index in run.indices]
            if len(where) != len(results):
                raise ValueError(
                    f"predict_batch: returned {len(results)} results for {len(where)} samples; "
                    "expected one per sample: the first axis of each array is the batch."
                )
            numbered += zip(where, results, strict=True)
            self._exp._handlers.fire("on_predict_batch_end", outputs)
        if means := self.meter.means():
            self._exp.logger.info("%s", line(self._exp.iteration, means))
        self.wait()
        of_ranks = distributed.gather_objects(numbered)
        if not isinstance(feed, MapStyleLoader):  # sharded by the user, who knows how
            return [result for of_rank in of_ranks for _, result in of_rank]
        by_index = {i: result for of_rank in of_ranks for i, result in of_rank}
        return [by_index[i] for i in sorted(by_index)]

    # --- sanity check --------------------------------------------------------------------

    @contextlib.contextmanager
    def trial(self, num_batches: int) -> Iterator[None]:
        """The phase "sanity": a few batches, and nothing of it remains but lines of text.

        Args:
            num_batches: That a run over a loader gives this rank at most.
        """
        exp, visualizer = self._exp, self._exp.visualizer
        with tempfile.TemporaryDirectory() as elsewhere:
            exp.visualizer = Visualizer(elsewhere if exp.rank == 0 else None)
            before, self.limit = self.limit, num_batches
            try:
                with self.undone(), self.phase("sanity"):
                    yield
            finally:
                exp.visualizer.close()
                self.limit, exp.visualizer = before, visualizer

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Takes back afterwards what the block did to the state and to plain attributes."""
        exp = self._exp
        found = exp._find_state()
        live, values = objects.capture(found)
        tensors = {n: {k: a.copy() for k, a in arrays.items()} for n, arrays in live.items()}
        attributes = exp._user_attributes()
        contents = {name: _content(value) for name, value in attributes.items()}
        arrays: dict[str, Any] = {}
        registered = {n: encoding.encode(getattr(exp, n), n, arrays) for n in exp._registered}
        arrays = {name: array.copy() for name, array in arrays.items()}
        counters = exp._handlers.state_dict()
        try:
            yield
        finally:
            for name in exp._user_attributes().keys() - attributes.keys():
                delattr(exp, name)
            for name, value in attributes.items():
                setattr(exp, name, value)
                _set_content(value, contents[name])
            exp._handlers.load_state_dict(counters)
            for name, value in registered.items():
                now: dict[str, Any] = {}
                same = encoding.encode(getattr(exp, name), name, now) == value
                if not same or any((a.data != arrays[n].data).any() for n, a in now.items()):
                    setattr(exp, name, encoding.decode(value, arrays))
            objects.apply(found, tensors, values)

    def close(self) -> None:
        """Lets go of the loaders' workers. May be called twice."""
        with contextlib.ExitStack() as steps:
            for feed in self._feeds.values():
                steps.callback(feed.close)


def _number(name: str, value: Any) -> float:
    try:
        return distributed.number(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"valid: the metric {name!r} is {value!r}; expected a number or a tensor of one."
        ) from None


def split(outputs: Any) -> list[Any]:
    """The outputs of a batch, sample by sample; tensors become numpy arrays and numbers.

    Args:
        outputs: A tensor or array [B, …], a mapping or tuple of such (each sample gets one of
            the same kind), or a list with one entry for each sample.

    Raises:
        TypeError: It is something else.
        ValueError: Its parts have different lengths.
    """
    if isinstance(outputs, Mapping):
        parts = {name: split(part) for name, part in outputs.items()}
        rows = _together(list(parts.values()))
        return [dict(zip(parts, row, strict=True)) for row in rows]
    if isinstance(outputs, tuple):
        rows = _together([split(part) for part in outputs])
        make = getattr(outputs, "_make", tuple)  # a named one stays so
        return [make(row) for row in rows]
    if isinstance(outputs, list):
        return [_plain(value) for value in outputs]
    array = to_numpy(outputs) if isinstance(outputs, paddle.Tensor) else outputs
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise TypeError(
            f"predict_batch: returned {outputs!r}; expected a tensor or array with the batch as "
            "its first axis, a mapping or tuple of them, or a list with one entry per sample."
        )
    return list(array)


def _together(columns: list[list[Any]]) -> list[tuple[Any, ...]]:
    if len({*map(len, columns)}) > 1:
        raise ValueError(
            f"predict_batch: returned parts of {[*map(len, columns)]} results; expected as many "
            "in each as there are samples."
        )
    return list(zip(*columns, strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, paddle.Tensor):
        return to_numpy(value).item() if value.size == 1 else to_numpy(value)
    return value


def _content(value: Any) -> Any:
    """A copy of what can be changed in place, of plain data and metrics; None of the rest."""
    try:
        if isinstance(value, paddle.metric.Metric):
            return copy.deepcopy(vars(value))
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            return None
        if isinstance(value, (list, dict, set, np.ndarray)) and not isinstance(value, np.memmap):
            encoding.encode(value, "", {})  # plain data alone: no layer, no loader
            return copy.deepcopy(value)
    except TypeError:
        pass
    return None


def _set_content(value: Any, content: Any) -> None:
    if content is None:
        return
    now = vars(value) if isinstance(value, paddle.metric.Metric) else value
    if pickle.dumps(now) == pickle.dumps(content):
        return  # what nobody changed stays the same object, to its depth
    if isinstance(value, paddle.metric.Metric):
        vars(value).update(content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        value.update(content)

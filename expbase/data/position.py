"""The data position: the epoch that one rank is in, and the place in it.

A LoaderAdapter decides which batches an epoch has.

    data = DataPosition()
    data.attach(adapt_loader(loader, "self.train_loader", Shard(seed=0)))
    data.open(epoch=3)
    state = data.state_dict()    # another process continues behind that batch
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from expbase.base.checkpoint_part import Part
from expbase.base.errors import RuntimeMistake, ValueMistake
from expbase.base.files import DAMAGES
from expbase.base.json_values import checksum
from expbase.base.read_limits import fraction
from expbase.config import ConfigError
from expbase.data.loaders import Batches, LoaderAdapter, Shard
from expbase.data.skipped_updates import Skips
from expbase.data.workers import Items

_UNKNOWN = "but which ones they were is unknown: some may come twice in it, others never"


class DataPosition(Part):
    """The training batches of one rank, epoch after epoch.

    Until `attach` is called there are no batches, and no epoch that could end.
    """

    def __init__(self) -> None:
        self.adapter = LoaderAdapter(None, "self.train_loader", Shard(seed=0))
        self.epoch = 0  # the epoch that was opened last; 0: none was
        self.batches = Batches(_nothing(), self.adapter)  # of this epoch
        self.batch_in_epoch = 0  # batches that this rank has read in it
        self._is_begun = False  # whether `begin` was called, and `open` was not
        self.resumed_within_epoch = False  # `load_state_dict` opened it; no batch was read since
        self.skips = Skips()  # what is left out
        self.leaves_epochs = False  # see `attach`
        self._iteration = 0  # the iteration for which the last batch was read
        self._reads = 0  # batches read for that iteration
        self._batch_size: int | None = None  # when the epoch was opened
        self.updates_per_epoch: Fraction | None = None  # one may lie in two epochs; None: unknown
        # How many more updates were made before this start than its epochs would have now, with
        # another batch size or number of ranks. So much longer the run is in all.
        self.ahead = Fraction(0)
        self._then: tuple[Any, Any] = None, None  # iteration and state of a checkpoint
        self._note_first: Callable[..., object] | None = None

    def attach(
        self,
        adapter: LoaderAdapter,
        *,
        leaves_epochs: bool = False,
        skip_updates: Iterable[int] = (),
        accumulation_steps: int = 1,
        note_first: Callable[..., object] | None = None,
    ) -> None:
        """Sets the training data.

        Args:
            adapter: The batches.
            leaves_epochs: If a checkpoint within an epoch has another order of samples, go on with
                the next epoch, as with --force, instead of an error.
            skip_updates: The updates whose batches are left out.
            accumulation_steps: Batches of an update, on each rank and of each share.
            note_first: Called with the iteration and a checksum of the first batch that is read.
        """
        self.adapter = adapter
        self.updates_per_epoch = adapter.updates_per_epoch(accumulation_steps)
        self.skips = Skips(skip_updates)
        self.leaves_epochs = leaves_epochs
        self.batches = Batches(_nothing(), adapter, ended=True)
        self._note_first = note_first
        match self._then:
            case int(iteration), {
                "ahead": str(),
                "updates_per_epoch": str() | None,
                "epoch": int(),
            }:
                with contextlib.suppress(*DAMAGES):
                    self.ahead = self._ahead_of(iteration, self._then[1])

    def check(self, loader: Any, training: Mapping[str, Any]) -> None:
        """Checks at the end of setup that the data fits the config.

        Args:
            loader: self.train_loader of now.
            training: The training section of the config.

        Raises:
            ValueError: There are no batches, the loader was set after setup_dataloader, or the
                config counts epochs or leaves out batches and there is no loader.
        """
        if self.adapter.batches_per_epoch == 0:
            raise self.adapter.no_batch()
        if self.adapter.loader is not loader:
            raise ValueMistake("self.train_loader: set too late; expected it in setup_dataloader.")
        for key in ("max_epoch", "valid_every_epoch", "save_every_epoch"):
            if training[key] and loader is None:
                raise ConfigError(
                    f"training.{key}: {training[key]} given, and without a self.train_loader there "
                    "are no epochs; expected 0, and max_iteration, valid_interval, save_interval."
                )
        if (skips := training["skip_updates"]) and loader is None:
            raise ConfigError(
                f"training.skip_updates: {skips} given, and without a self.train_loader there are "
                "no batches to leave out; expected []. Leave them out where the data is made."
            )

    def check_same_loader(self, loader: Any) -> None:
        """Raises a RuntimeError if self.train_loader was set anew after setup."""
        if self.adapter.loader is not loader:
            raise RuntimeMistake(
                "self.train_loader: set anew after setup, and a resumed run has the one that "
                "setup_dataloader makes. Make one loader there, and change what is in it, for "
                "example in on_train_epoch_begin: self.train_loader.dataset.level = 2, or a "
                "sampler's weights."
            )

    @property
    def needs_epoch(self) -> bool:
        """Whether all batches of the epoch were read, or none was opened yet."""
        return self.batches.ended

    @property
    def samples_per_round(self) -> int | None:
        """Samples of one batch on each rank; None: unknown."""
        size = self.adapter.batch_size
        return size and size * self.adapter.shard.world_size

    def begin(self, epoch: int) -> None:
        """Ends the epoch before; `open_begun`, or a batch that is read, opens this one.

        Until then its data set and its sampler may be changed.
        """
        self.batches.close()
        self.batches = Batches(_nothing(), self.adapter)
        self.epoch = epoch
        self.batch_in_epoch = 0
        self.resumed_within_epoch = False
        self._is_begun = True

    def open_begun(self) -> None:
        """Opens the epoch that was begun, if it is not open yet."""
        if self._is_begun:
            self.open(self.epoch)

    def open(self, epoch: int, position: int = 0) -> None:
        """Goes to a position in an epoch; see `LoaderAdapter.open`."""
        self.begin(epoch)
        self._is_begun = False
        self._batch_size = self.adapter.batch_size
        self.batches = self.adapter.open(epoch, position)

    def read(self, iteration: int = 0) -> Any:
        """Reads the next batch of the epoch, for an iteration.

        Raises:
            ValueError: There is no loader.
            RuntimeError: The epoch has no more batches.
        """
        if iteration != self._iteration:
            self._iteration = iteration
            self._reads = 0
        self._reads += 1
        batch = self.read_for_none()
        if self._note_first is not None:
            self._note_first(iteration=iteration, first_batch=checksum(batch))
            self._note_first = None
        return batch

    def read_for_none(self) -> Any:
        """Reads the next batch of the epoch, which counts for no iteration; raises as `read`."""
        self.open_begun()
        self.batch_in_epoch += 1
        self.resumed_within_epoch = False
        try:
            return next(self.batches)
        except StopIteration:
            if self.adapter.loader is None:
                raise self.adapter.not_set() from None
            raise RuntimeMistake(
                f"{self.adapter.name}: has no more batches in this epoch; expected an epoch that "
                "was opened, and the batches that its length, or the run that is continued, "
                "promised."
            ) from None

    def samples_in(self, batch: Any) -> int | None:
        """Returns the number of samples in the batch read last; None: unknown."""
        return self.adapter.samples_in(batch, self.batches.taken)[0]

    def part_of_update(self, count: int, rank: int) -> tuple[int, int]:
        """Returns the number of the last batch within its update.

        Args:
            count: Batches of an update on each rank.
            rank: Whose batch it is.

        Returns:
            The number over all ranks, from 0, and how often this rank had it before in this
            update: a train_batch may read more than `count` batches.
        """
        turn, number = divmod(max(self._reads - 1, 0), count)
        return rank * count + number, turn

    @property
    def _layout(self) -> list[Any]:
        """The kind of order, the samples in a data set and in a batch (None: unknown), and the
        number of ranks if each has another order, else 0.

        A position is valid in each epoch for which the first two are the same. It says which
        samples came before it if all ranks have one order.
        """
        adapter = self.adapter
        ranks = 0 if adapter.has_one_order else adapter.shard.world_size
        size = self._batch_size if self.epoch else adapter.batch_size
        return [adapter.kind, adapter.num_samples, size, ranks]

    def state_dict(self) -> dict[str, Any]:
        """Returns the position. It counts over all ranks, so any number of them may continue."""
        loader = dict(self.adapter.state_dict())
        if self.needs_epoch or self._is_begun:  # these are of the epoch before
            for name in ("listing", "attributes", "last"):
                loader.pop(name, None)
        return {
            "epoch": self.epoch,
            "batches": self.batch_in_epoch * self.adapter.shard.world_size,
            "position": self.batches.taken.end,
            "ended": self.batches.ended or not self.epoch,
            "skipped": [*self.skips.done],
            "updates_per_epoch": self.updates_per_epoch and str(self.updates_per_epoch),
            "ahead": str(self.ahead),
            "loader": loader,
            "layout": self._layout,
            "order": None if self.batches.ended or self._is_begun else self.adapter.checksum(),
        }

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """Returns why a state does not fit: no loader, or another order within an epoch."""
        name = self.adapter.name
        epoch = state["epoch"]
        if self.adapter.loader is None:
            return [f"{name}: not set; the checkpoint is of epoch {epoch}."] if epoch else []
        if state["ended"] or self._has_order_of(state) or self.leaves_epochs:
            return []
        return [
            f"{name}: {_described(state['layout'])} there, {_described(self._layout)} now, in the "
            f"middle of epoch {epoch}; expected the same order, or --force, which goes on with "
            "the next epoch."
        ]

    def _has_order_of(self, state: Mapping[str, Any]) -> bool:
        """Returns whether the kind of order and the number of samples are those of a state."""
        return bool(state["layout"][:2] == self._layout[:2])

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Goes to the position of a state; returns reasons why continuing is not exact.

        With another batch size or number of ranks, `batch_in_epoch` is the number of samples read,
        divided by the samples of a batch of now, rounded down.
        """
        adapter = self.adapter
        if adapter.loader is None:
            return []
        self.skips.done = [*state["skipped"]]
        adapter.load_state_dict(state["loader"])
        reasons: list[str] = []
        there = state["layout"]
        now = self._layout
        if state["ended"] or not self._has_order_of(state):
            # Nothing is opened: the next thing to come is a new epoch.
            self.begin(state["epoch"])
            self._is_begun = False
            self.batches = Batches(_nothing(), adapter, state["position"], ended=True)
            self._batch_size = there[2]
            how = "the next epoch is the first one of the new size"
        elif not state["position"]:  # it had begun: the first read opens it, with all restored
            self.begin(state["epoch"])
            self.resumed_within_epoch = True
            how = "the epoch begins with them"
        else:
            self.open(state["epoch"], state["position"])
            self.resumed_within_epoch = not self.batches.ended
            reasons += adapter.why_not_exact() if there == now else []
            how = "the epoch goes on with the samples that it has not had"
            is_another = len({adapter.checksum(), state["order"]} - {None}) > 1
            if is_another:
                reasons.append(
                    f"{adapter.name}: its sampler gives another order of this epoch than before; "
                    "expected a data set that has as many samples as when the epoch began, and a "
                    "sampler that draws from random, numpy or paddle"
                )
            if is_another or there[-1] or now[-1]:
                how = f"the epoch goes on behind {state['position']} samples, {_UNKNOWN}"
        self.batch_in_epoch = state["batches"] // adapter.shard.world_size
        if there != now:
            if self.samples_per_round:
                self.batch_in_epoch = state["position"] // self.samples_per_round
            text = f"{_described(there)} there, {_described(now)} now"
            reasons.append(f"{adapter.name}: {text}: {how}")
        return reasons

    def expect(self, iteration: Any, state: Any) -> None:
        """Notes from where this start will go on; setup_model may ask how long the run is.

        What is wrong with a state is said when it is restored.
        """
        self._then = iteration, state

    def _ahead_of(self, iteration: int, state: Mapping[str, Any]) -> Fraction:
        """Returns what `ahead` is for a start that goes on from the state of an iteration."""
        now = self.updates_per_epoch
        if now is None or state["updates_per_epoch"] in (None, str(now)):
            return fraction(state["ahead"])
        epochs = Fraction(state["epoch"])
        if not state["ended"] and self._has_order_of(state):
            # Rounded down: a schedule that is one update too long does no harm.
            batches = state["batches"] // self.adapter.shard.world_size
            if state["layout"] != self._layout and self.samples_per_round:
                batches = state["position"] // self.samples_per_round
            epochs += Fraction(batches, self.adapter.batches_per_epoch or 1) - 1
        return iteration + len(state["skipped"]) - epochs * now

    def close(self) -> None:
        """Ends worker processes. May be called twice."""
        self.batches.close()
        self.adapter.close()


def _nothing() -> Items:
    yield from ()


def _described(layout: list[Any]) -> str:
    kind, samples, batch_size, ranks = layout
    size = "unknown" if batch_size is None else batch_size
    text = f"{samples or '?'} samples, {kind}, in batches of {size}"
    return f"{text}, world size {ranks}" if ranks else text

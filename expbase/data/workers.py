"""Making batches: in this thread, or in worker processes that leave nothing behind.

The generators are seeded for each batch, from its position, so what a data set draws is the same
here, in any worker, and after a resume.

    fetcher = Fetcher(loader, "self.train_loader", say)    # over a data set with indices
    for batch, taken, last in fetcher.fetch(iter([IndexBatch(0, [5, 2], 2)]), base=seed): ...
    fetcher.close()
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import multiprocessing
import multiprocessing.util
import operator
import os
import pickle
import re
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base import core
from paddle.io import DataLoader, IterableDataset, TensorDataset, get_worker_info
from paddle.io.dataloader import worker as paddle_worker
from paddle.io.dataloader.collate import default_collate_fn, default_convert_fn

from expbase.base import rng
from expbase.base.errors import add_note
from expbase.base.processes import end_with_parent, forking, signals_held, survive_signals
from expbase.data import shared_memory
from expbase.data.order import IndexBatch
from expbase.data.shared_memory import leave_note, remove_left_files
from expbase.data.tensors import reader_tensors_at, tensors_at, to_arrays
from expbase.state.compare import Looked

_LOADER = "train_loader."  # what the paths of a loader's parts begin with in an experiment
_of_the_run: list[Any] = []  # iterators that a fork has left, whose workers are not its own
_DEAD = "A worker of a DataLoader has died"
# What paddle says, whatever has happened: paddle/phi/core/operators/reader/blocking_queue.h.
_KILLED = "Blocking queue is killed"

# A batch, where it stands in the epoch, and whether it is the last one.
Items = Generator[tuple[Any, IndexBatch, bool], None, None]


class Fetcher:
    """Makes the numbered batches of a DataLoader over a data set with indices."""

    def __init__(self, loader: DataLoader, name: str, say: Callable[[str], object]) -> None:
        self._loader = loader
        self._name = name
        self._say = say
        # The loader whose persistent workers wait for an epoch, and what they have copies of. It is
        # None while they serve one: another run over the same data then starts workers of its own.
        self._idle: tuple[DataLoader, Looked | None] | None = None
        self._leaving: list[Any] = []  # paddle's iterators whose workers were told to end

    def fetch(self, numbered: Iterator[IndexBatch], base: int) -> Items:
        """Yields the batches as paddle's loader would return them.

        Args:
            numbered: The batches to load, in order.
            base: The seed from which, with its position, the seed of each batch is derived.

        Yields:
            A batch, its IndexBatch, and whether it is the last one.
        """
        return (self._by_workers if self._loader.num_workers else self._here)(numbered, base)

    def close(self) -> None:
        """Ends persistent workers. May be called twice."""
        if self._idle is not None:
            _end_workers(self._idle[0]._iterator)
            self._idle = None  # a later run over the data starts new ones
        self._wait_for_leaving()

    def _wait_for_leaving(self) -> None:
        while self._leaving:
            _end_workers(self._leaving.pop())

    def _here(self, numbered: Iterator[IndexBatch], base: int) -> Items:
        # Synchronous, in this thread. Paddle uses a thread even without workers
        # (paddle/io/dataloader/dataloader_iter.py, _DataLoaderIterSingleProcess._thread_loop): it
        # reads ahead, draws from the same generators as training does, and hangs for ever when the
        # data set raises an exception.
        dataset = _BatchDataset(self._loader)
        to_tensors = tensors_at(self._loader.places[0])
        for taken, last in with_last(numbered):
            if not dataset.draws_nothing:
                rng.seed_all(rng.derive(base, taken.position))  # paddle draws on the device here
            try:
                batch = dataset.batch(taken.indices)
            except (Exception, SystemExit) as error:
                add_note(error, f"{self._name}: raised {dataset.under_way(taken.indices)}")
                raise
            yield to_tensors(batch), taken, last

    def _by_workers(self, numbered: Iterator[IndexBatch], base: int) -> Items:
        # Workers are some batches ahead of training. They return batches in the order in which
        # the keys were handed out; `tee` keeps the rest of each item until its batch is there.
        ahead, returned = itertools.tee(with_last(numbered))
        loader, copied = self._idle_loader() or self._new_loader()
        self._idle = None
        failed: list[BaseException] = []
        keys = ([(base, taken)] for taken, _ in ahead)
        loader.batch_sampler.keys = _until_failure(keys, failed)
        # Paddle draws a seed from numpy when it makes an iterator:
        # paddle/io/dataloader/dataloader_iter.py, _DataLoaderIterMultiProcess.__init__.
        rng.seed_cpu(base)
        if self._loader.worker_init_fn is not None:  # it may take what one alone can have: a lock
            self._wait_for_leaving()
        iterator = _started(loader)
        self._wait_for_leaving()  # of the epoch before: they had the time of this start, too
        to_tensors = reader_tensors_at(loader.places[0])
        last = False
        try:
            for batch, (taken, last) in zip(iterator, returned, strict=False):
                _raise_sent(batch, self._name)
                if last and not self._loader._persistent_workers:
                    _dismiss(iterator)  # they end beside the update: it takes some milliseconds
                yield to_tensors(batch), taken, last
            if failed:  # in the sampler: behind the batches before it, as without workers
                raise failed[0]
        except SystemError as error:
            _explain_dead_worker(error)  # before the others are ended
            raise
        finally:
            # After an epoch that was left early persistent workers still hold batches of it, which
            # paddle would return in the next epoch (_DataLoaderIterMultiProcess._reset): such
            # workers are ended.
            if last and self._loader._persistent_workers and self._idle is None:
                self._idle = loader, copied
            elif last:
                _dismiss(iterator)  # unless it was: the last batch may be an exception
                self._leaving.append(iterator)
            else:
                _end_workers(iterator)

    def _idle_loader(self) -> tuple[DataLoader, Looked | None] | None:
        """Returns the loader whose workers wait; ends them, and says so once, if what they have
        copies of is another now.
        """
        if self._idle is None:
            return None
        loader, copied = self._idle
        path = copied and copied.first_change(self._copied())
        if not path:
            return self._idle
        _end_workers(loader._iterator)
        self._say(
            f"{self._name}: {path.removeprefix(_LOADER)} has changed, and its persistent workers "
            "had copies of it: they are started anew, as after each such change"
        )
        self._say = id
        return None

    def _new_loader(self) -> tuple[DataLoader, Looked | None]:
        """Returns a loader that will start workers, and a look at what lasting ones copy."""
        lasts = self._loader._persistent_workers
        return self._worker_loader(), Looked(self._copied()) if lasts else None

    def _copied(self) -> dict[str, Any]:
        """Returns what workers have copies of, by path."""
        loader = self._loader
        return {f"{_LOADER}dataset": loader.dataset, f"{_LOADER}collate_fn": loader.collate_fn}

    def _worker_loader(self) -> DataLoader:
        # To paddle, a whole batch is one sample here, and each of its batches has one sample.
        loader = _with_hardened_workers(self._loader, _BatchDataset(self._loader))
        loader._persistent_workers = self._loader._persistent_workers
        loader.batch_sampler = _Keys()
        return loader


class ReaderThreads:
    """Hears what paddle's reader threads raise; the main thread does not get to know it.

    Each loader with workers that is iterated by hand has such a thread. It gets the exception of a
    worker and raises it itself (paddle/io/dataloader/dataloader_iter.py,
    _DataLoaderIterMultiProcess._thread_loop).
    """

    _raised = ""  # by the last one, as a traceback

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Listens in the block."""
        before = threading.excepthook

        def hear(args: Any) -> None:
            frames = {
                frame.f_code.co_name: frame
                for frame, _ in traceback.walk_tb(args.exc_traceback)
                if "paddle" in frame.f_code.co_filename
            }
            if "_thread_loop" in frames:
                # The worker's own traceback. Paddle makes the exception anew with it as its
                # argument: a KeyError shows it in one line, and a class that takes two arguments
                # fails (paddle/io/dataloader/worker.py, _WorkerException.reraise).
                sent = frames["reraise"].f_locals["msg"] if "reraise" in frames else ""
                self._raised = sent or "".join(traceback.format_exception(args.exc_value))
            before(args)

        threading.excepthook = hear
        try:
            yield
        finally:
            threading.excepthook = before

    def explain(self, error: BaseException) -> None:
        """Adds the cause to the exception that paddle raises when a loader has failed."""
        if self._raised and isinstance(error, SystemError) and _KILLED in str(error):
            add_note(error, self._raised)
        else:
            _explain_dead_worker(error)


def _explain_dead_worker(error: BaseException) -> None:
    """Adds how a worker has ended to the exception that paddle raises, once."""
    raised: BaseException | None = error
    while raised is not None and not isinstance(raised, SystemError):
        # A handler of SIGCHLD raises it wherever the main thread is, maybe in a function that makes
        # another error of it: paddle/io/multiprocess_utils.py, _set_SIGCHLD_handler.
        raised = raised.__cause__ or raised.__context__
    if raised is None or _DEAD in "".join(getattr(raised, "__notes__", raised.args[1:])):
        return
    text = str(raised)
    if killed := re.search(r"killed by signal: (.*?)\.? \(", text):
        add_note(error, _ended_by(killed[1]))
    elif exited := re.search("exited unexpectedly with code ([0-9]+)", text):
        add_note(error, _ended_by(int(exited[1])))
    elif _KILLED in text:
        # paddle/io/dataloader/dataloader_iter.py, _DataLoaderIterMultiProcess.__next__, has raised
        # it, and its `self` has the workers.
        frames = [frame for frame, _ in traceback.walk_tb(raised.__traceback__)]
        readers = [frame.f_locals.get("self") for frame in frames[-1:]]
        codes = [w.exitcode for reader in readers for w in getattr(reader, "_workers", ())]
        for code in [code for code in codes if code is not None][:1]:
            add_note(error, _ended_by(code if code >= 0 else signal.strsignal(-code)))


def _ended_by(cause: int | str | None) -> str:
    """Returns a sentence on how a worker has ended: by an exit code, or by a signal, in words."""
    if isinstance(cause, int):
        why = f"it ended itself with code {cause}. Look for os._exit in what its data set calls"
    elif cause in map(signal.strsignal, (signal.SIGKILL, signal.SIGBUS)):
        why = f"it had no more memory, or no more room in /dev/shm (signal: {cause})"
    else:
        why = f"a signal has ended it: {cause}"
    return f"{_DEAD}: {why}."


class _BatchDataset:
    """The batches of a loader by key: a seed, and the IndexBatch.

    In a worker an exception becomes a batch. Paddle would raise it in a thread of this process, and
    here a SystemError without it (paddle/io/dataloader/dataloader_iter.py,
    _DataLoaderIterMultiProcess._get_data).
    """

    failure: Any = None  # the batch that says why worker_init_fn has failed

    def __init__(self, loader: DataLoader) -> None:
        self._dataset = loader.dataset
        self._makes_batches = loader.auto_collate_batch
        self._collate = _collate_fn(loader)
        self._samples: list[Any] = []  # of the batch under way
        # Paddle's own: all samples at once, which takes a tenth of the time.
        at_once = type(loader.dataset) is TensorDataset and self._collate is default_collate_fn
        tensors: Sequence[Any] = loader.dataset.tensors if at_once else ()
        # They may be arrays, too, of which the data set takes rows.
        self._tensors = tensors if all(isinstance(t, paddle.Tensor) for t in tensors) else ()
        self.draws_nothing = at_once  # random numbers, whatever is asked for

    def __getitem__(self, key: tuple[int, IndexBatch]) -> Any:
        if self.failure is not None:
            return self.failure
        base, taken = key
        # What is drawn for a batch does not depend on those before, which another worker may have
        # made, or the run that this one continues.
        rng.seed_cpu(rng.derive(base, taken.position))
        try:
            return to_arrays(self.batch(taken.indices))
        except (Exception, SystemExit) as error:
            return _sent(error, self.under_way(taken.indices))

    def batch(self, indices: Any) -> Any:
        """Makes the batch of these samples."""
        self._samples = samples = []
        if self._tensors:
            with contextlib.suppress(Exception):  # of a wrong index, which is found below
                rows = self._rows(indices)
                return [paddle.index_select(tensor, rows) for tensor in self._tensors]
        for index in indices:
            samples.append(self._dataset[index])
        # With batch_size=None an item of the data set is a batch already.
        return self._collate(samples if self._makes_batches else samples[0])

    def _rows(self, indices: Any) -> paddle.Tensor:
        """Returns indices as a tensor where the data set's are."""
        rows = np.asarray(indices)
        if not self._tensors[0].place.is_cpu_place():
            # A GPU's kernel reads from wherever a wrong index points to, without a word:
            # paddle/phi/kernels/gpu/index_select_impl.h, index_select_cuda_kernel.
            size = len(self._dataset)
            if rows.min() < -size or rows.max() >= size:
                raise IndexError
        return tensors_at(self._tensors[0].place)(rows)

    def under_way(self, indices: Any) -> str:
        """Returns a text on the step that an exception has interrupted, for its note."""
        indices = list(indices)
        if len(self._samples) < len(indices):
            return f"by sample {indices[len(self._samples)]!r} of the data set"
        return f"by collate_fn for the samples {textwrap.shorten(repr(indices), 400)}"


class _StreamOfBatches(IterableDataset):  # type: ignore[misc]  # paddle has no types
    """The batches of an IterableDataset's loader in a worker, where an exception becomes one."""

    failure: Any = None  # the batch that says why worker_init_fn has failed

    def __init__(self, loader: DataLoader) -> None:
        self._dataset = loader.dataset
        self._collate = _collate_fn(loader)
        self._size = loader.batch_size  # None: an item of the data set is a batch already
        self._drop_last = loader.drop_last

    def batches(self, cut: int = 0) -> Iterator[tuple[Any, int]]:
        """Yields the batches of the samples behind the first `cut` ones, and how many these are; 1
        of a ready-made one.
        """
        size = self._size
        samples: Iterator[Any] = itertools.islice(self._dataset, cut, None)
        by_size = iter(lambda: list(itertools.islice(samples, size)), [])
        for chunk in samples if size is None else by_size:
            if size is None or len(chunk) == size or not self._drop_last:
                yield self._collate(chunk), 1 if size is None else len(chunk)

    def __iter__(self) -> Iterator[Any]:
        if self.failure is not None:
            yield self.failure
            return
        count = 0
        try:
            for batch, asked in self.batches():
                yield [to_arrays(batch), asked]
                count += 1
        except (Exception, SystemExit) as error:
            worker = get_worker_info()
            yield _sent(error, f"in worker {worker.id}, after {count} batches of its own")


def _sent(error: BaseException, what: str) -> list[Any]:
    """Returns the batch that carries an exception to the training process.

    It holds an array: paddle takes a batch without any for the end of the data
    (paddle/io/dataloader/dataloader_iter.py, _DataLoaderIterMultiProcess.__next__).
    """
    return [np.zeros(1), _sendable(error), what]


def _raise_sent(batch: Any, name: str) -> None:
    """Raises the exception that a batch of a worker carries."""
    match batch:
        case [_, BaseException() as error, str() as what]:
            add_note(error, f"{name}: raised {what}")
            raise error


def _sendable(error: BaseException) -> Any:
    """Returns an exception that can be pickled, and raised with the traceback as its cause."""
    trace = error.__traceback__
    try:
        pickle.loads(pickle.dumps(error))
        is_shown = not isinstance(error, SystemExit)  # by which Python ends without a word
    except Exception:  # it has arguments of its own, say
        is_shown = False
    if not is_shown:
        error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(trace)
    from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]

    return ExceptionWithTraceback(error, trace)


class _Keys:
    """A batch sampler whose batches are set anew for each epoch."""

    keys: Iterator[list[Any]]

    def __iter__(self) -> Iterator[list[Any]]:
        return self.keys


def _until_failure(keys: Iterator[Any], failed: list[BaseException]) -> Iterator[Any]:
    """Yields keys; an exception is noted, and ends them.

    Paddle asks for the first ones while it makes its iterator, and in 3.0 leaves the workers alone
    when that fails: a process then waits for them at its end, for ever.
    """
    try:
        yield from keys
    except (Exception, SystemExit) as error:
        failed.append(error)


def streamed_by_workers(
    loader: DataLoader, name: str, note_asked: Callable[[int], object]
) -> Iterator[Any]:
    """Yields the batches of an IterableDataset's DataLoader with workers, which end with it.

    Args:
        loader: The DataLoader.
        name: What the user calls it, for messages.
        note_asked: Called before each batch with the samples that went into collate_fn.
    """
    hardened = _with_hardened_workers(loader, _StreamOfBatches(loader))
    hardened.batch_sampler = itertools.repeat([None])
    iterator = _started(hardened)
    to_tensors = reader_tensors_at(loader.places[0])
    try:
        for batch in iterator:
            _raise_sent(batch, name)
            note_asked(batch[1])
            yield to_tensors(batch[0])
    except SystemError as error:
        _explain_dead_worker(error)  # before the others are ended
        raise
    finally:
        _end_workers(iterator)


def _started(loader: DataLoader) -> Any:
    """Starts paddle's iterator over a loader; multiprocessing ends its workers by SIGKILL at exit.

    They survive its SIGTERM.
    """
    with forking(), signals_held({signal.SIGTERM}):
        iterator = iter(loader)
    for worker in iterator._workers:
        worker._popen.terminate = functools.partial(_kill, worker.pid, id(iterator))
    return iterator


def _kill(pid: int, iterator: int) -> None:
    # Else paddle raises an error for a worker that was killed: paddle/io/multiprocess_utils.py,
    # _set_SIGCHLD_handler.
    core._erase_process_pids(iterator)  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)


def _dismiss(iterator: Any) -> None:
    """Tells the workers of paddle's iterator to end, and waits for none. May be called twice."""
    iterator._try_shutdown_all(0)  # seconds to wait for each


def _end_workers(iterator: Any) -> None:
    """Ends the workers of paddle's iterator, and removes the batches that nobody has taken."""
    if iterator._workers[0]._parent_pid != os.getpid():
        _of_the_run.append(iterator)  # which would end them when it is collected
        return
    _dismiss(iterator)
    for worker in iterator._workers:
        worker.join(1)
        worker.kill()  # that one is still busy
        worker.join()
    remove_left_files()


def _with_hardened_workers(loader: DataLoader, batches: Any) -> DataLoader:
    """Returns a copy of a loader whose workers end with this process, and survive its group's
    signals.

    Args:
        loader: A DataLoader with workers.
        batches: The data set of the copy. To paddle, a whole batch is one sample of it, and each of
            its batches has one sample.
    """
    hardened = copy.copy(loader)
    init_fn = loader.worker_init_fn
    hardened.worker_init_fn = functools.partial(_start_worker, loader.dataset, batches, init_fn)
    hardened.dataset = batches
    hardened.auto_collate_batch = True
    hardened.collate_fn = operator.itemgetter(0)
    hardened._persistent_workers = False
    hardened._iterator = None
    return hardened


@contextlib.contextmanager
def workers_end_with_this() -> Iterator[None]:
    """Makes daemonic children that are forked in the block end with this process, however it ends,
    and not before it, by a signal to its group.

    Such are the workers of a loader that is iterated by hand. Python ends them at its exit, but
    after a kill -9 paddle's would wait for ever: in _worker_loop (paddle/io/dataloader/worker.py)
    the seconds to wait for an index are given to Queue.get as `block`.
    """
    as_long_as_this_lives = threading.Event()
    multiprocessing.util.register_after_fork(as_long_as_this_lives, _end_if_daemonic)
    try:
        yield
    finally:
        as_long_as_this_lives.set()
        remove_left_files()


def _end_if_daemonic(_: object) -> None:
    if multiprocessing.current_process().daemon:
        os.setpgrp()  # a signal to the group is the training process's alone, as in _start_worker
        _end_with_parent(os.getpid())


@functools.cache  # once in a process
def _end_with_parent(own: int) -> None:
    """Makes this process end with its parent, and remove its files in shared memory then.

    Args:
        own: The id of this process, for the cache: a fork has another one.
    """
    parent = multiprocessing.parent_process()
    note = leave_note()

    def finish() -> None:
        # In a program of its own, which ends all other threads of this process before it begins:
        # one of them might make a file behind what is removed.
        with contextlib.suppress(OSError):
            os.execv(sys.executable, [sys.executable, "-I", "-S", shared_memory.__file__])
        if note is not None:
            os.close(note)
        remove_left_files()

    end_with_parent((parent and parent.pid) or os.getppid(), finish)


def _start_worker(
    dataset: Any, batches: Any, init_fn: Callable[[int], None] | None, worker_id: int
) -> None:
    # The launcher sends SIGTERM to the whole process group, and a scheduler perhaps to everybody. A
    # worker that died of it would make the training process fail, before it has saved.
    survive_signals()
    _end_with_parent(os.getpid())
    # get_worker_info().dataset is the user's data set, not the wrapper around it.
    paddle_worker._worker_info.__dict__["dataset"] = dataset
    if init_fn is not None:
        try:
            init_fn(worker_id)
        except (Exception, SystemExit) as error:
            batches.failure = _sent(error, f"by worker_init_fn({worker_id})")


def batched_stream(
    loader: DataLoader, note_asked: Callable[[int], object], cut: int = 0
) -> Iterator[Any]:
    """Yields the batches of an IterableDataset's DataLoader without workers, in this thread.

    Args:
        loader: The DataLoader.
        note_asked: Called before each batch with the samples that went into collate_fn.
        cut: Samples that are left out at the start.
    """
    to_tensors = tensors_at(loader.places[0])
    for batch, asked in _StreamOfBatches(loader).batches(cut):
        note_asked(asked)
        yield to_tensors(batch)


def _collate_fn(loader: DataLoader) -> Callable[[Any], Any]:
    default = default_collate_fn if loader.auto_collate_batch else default_convert_fn
    return loader.collate_fn or default  # type: ignore[no-any-return]


def with_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Yields each item, and whether it is the last; reads one ahead."""
    for item in items:
        for following in items:
            yield item, False
            item = following
        yield item, True

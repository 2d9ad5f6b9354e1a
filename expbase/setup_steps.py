"""The steps of setup that every run takes alike; their order is in experiment.py.

Each step adds to `_on_close` how it is undone.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import paddle

from expbase import checks, distributed
from expbase.config import ConfigError, flatten
from expbase.data.loaders import num_samples
from expbase.logs import open_log
from expbase.meter import METRICS, MetricsFile
from expbase.metrics import MetricLog
from expbase.processes import remove_left_files
from expbase.record import provenance
from expbase.record.run_record import LEDGER, RunRecord
from expbase.reporting import Reporting
from expbase.state.objects import half_protocols, hidden_layers
from expbase.stopping import StopRequests
from expbase.visualizer import Visualizer


class SetupSteps(Reporting):
    """Device, processes, output directory, config dump, VisualDL, log; the checks at the end."""

    def prepare(self) -> None:
        """The first thing in setup: downloads, environment. Does nothing here."""

    def startup(self) -> None:
        """After setup_model: fills parameters, or sets the iteration to count from, say.

        A state that is restored overrides it.
        """

    def setup_device(self) -> None:
        """Makes paddle use `args.device`; by default the GPU if there is one, else the CPU.

        Raises:
            ConfigError: There is no such device, or the processes would share one.
        """
        device = getattr(self.args, "device", None) or distributed.default_device()
        option = checks.as_written(self.args, "device")
        if self.parallel and ":" in device:
            raise ConfigError(
                f"{option}: {device!r} given with {self.world_size} processes; expected "
                f"{device.partition(':')[0]!r}: each process takes its own."
            )
        try:
            paddle.set_device(device)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{option}: {device!r} given; expected cpu, gpu, gpu:0 or another device that "
                f"this machine has and this paddle was built for. ({error})"
            ) from error
        if self.config.training.deterministic and device.startswith("gpu"):
            paddle.set_flags({"FLAGS_cudnn_deterministic": 1, "FLAGS_embedding_deterministic": 1})

    def init_parallel(self) -> None:
        """Waits for all processes, watches over them from then on, and connects them."""
        from expbase.watch import Watch  # here: one process has nobody to watch

        self._other_ranks = Watch(self._end_with_another_rank, self._say_now)
        self._on_close.callback(self._other_ranks.stop)
        distributed.init_parallel(paddle.device.get_device())

    def setup_output_dir(self) -> None:
        """Makes and locks the output directory.

        Raises:
            ConfigError: It cannot be used, is in use, or holds a run of another config.
        """
        if self.read_only:  # it writes nothing, so it needs no lock
            return self._run_dir.expect()
        self._on_close.callback(self._run_dir.release)
        fresh, force = getattr(self.args, "fresh", False), getattr(self.args, "force", False)
        moved_aside = distributed.on_rank_zero(
            lambda: self._run_dir.claim(self.config, fresh=fresh, force=force), "output directory"
        )
        if fresh and not self._run_dir.is_of_rank_zero():
            moved_aside = self._run_dir.move_aside()
        if fresh:
            distributed.wait_for_all("--fresh")  # several ranks may share what one moves aside
        if self.rank > 0:  # perhaps on another machine
            self._run_dir.make()
            self._run_dir.lock(self.rank)
        if moved_aside is not None:
            self.logger.info("the run that was here is now in %s", moved_aside)
        remove_left_files()
        self._on_close.callback(remove_left_files)

    @property
    def _writes(self) -> bool:
        return self.rank == 0 and not self.read_only

    def dump_config(self) -> None:
        """Writes the resolved config, once in the life of a run."""
        if self._writes:
            self._run_dir.dump(self.config)

    def setup_visualizer(self) -> None:
        """Prepares VisualDL; its file is opened at the first record."""
        self.visualizer = Visualizer(self.output_dir if self._writes else None, self.logger)

    def setup_logger(self) -> None:
        """Opens this rank's text log and, on rank 0, metrics.jsonl and ledger.jsonl."""
        path = None if self.read_only else self._log_path
        open_log(self.logger, path, echo=self.rank == 0)
        file = MetricsFile(self.output_dir / METRICS if self._writes else None)
        self._metric_log = MetricLog(self.logger, file, self.visualizer)
        self._on_close.callback(self._metric_log.close)
        self._run_record = RunRecord(self.output_dir / LEDGER if self._writes else None)
        if self._writes:  # in a thread: the rest of setup does not wait for git
            # Closing waits for it: it writes into the directory, too.
            submit = self._on_close.enter_context(ThreadPoolExecutor(1)).submit
            self._run_record.gathered = submit(provenance.gather, self.output_dir, type(self))
        training, supervisor = self.config.training, self._supervisor
        self._stop_requests = StopRequests(
            self.output_dir / "STOP" if self._writes else None,
            training.time_limit_seconds,
            save_seconds=training.save_seconds if self._writes else 0,
            parallel=self.parallel,
            began=supervisor and supervisor.began,
        )
        self._on_close.callback(self._stop_requests.remove_stop_file)
        if supervisor and supervisor.reason:
            self.logger.warning("%s", supervisor.reason)

    def check_setup(self) -> None:
        """Checks that training has what it needs, and says what there is.

        Raises:
            ValueError: Something is missing, would fail at the first batch, or differs by rank.
        """
        counters = {"iteration": self.iteration, "epoch": self.epoch}  # startup may set them
        checks.check_template({**self._names.template, **counters}, vars(self))
        self._subscribers.check_known()
        found = self._saved_objects()
        adapter, own = self._iterator.adapter, self._user_attributes()
        checks.check_data(adapter, self.train_loader, own, self.config.training)
        checks.check_state(found)
        facts = {f"config.{key}": repr(value) for key, value in flatten(self.config).items()}
        facts["self.train_loader"] = f"{self.batches_per_epoch} batches"
        facts["self.valid_loader"] = f"{num_samples(self.valid_loader)} samples"
        checks.check_alike({**facts, **found.shapes()})
        for name in hidden_layers(self.__dict__, found):
            self.logger.warning(
                f"self.{name}: a layer within a plain object is not saved; expected an attribute "
                "of the experiment, or a list, a dict or a layer with it."
            )
        for name in half_protocols(own):
            self.logger.warning(
                f"self.{name}: has one half of state_dict and load_state_dict (or set_state_dict), "
                "so it is not saved; expected both, or exclude_from_state."
            )
        self._checkpointer.expect(found)
        self._say_what_there_is()

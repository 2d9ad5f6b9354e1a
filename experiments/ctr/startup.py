"""Stages of config.yaml: embeddings into a file at the end of a run, and from it into another."""

import numpy as np
from blocks import write_whole


class Terminal:
    """Writes embeddings.npy, [ids, 1 + factors], into the output of a run that came to its end.

    Not in on_train_end, which a run that is killed right after its last checkpoint never reaches:
    terminal comes, too, when the same command finds the run finished.
    """

    def terminal(self, context):
        if self.finished and self.rank == 0:
            net = self.unwrap(self.model)
            table = np.concatenate([net.weights.weight, net.factors.weight], axis=1)
            write_whole(self.output_dir / "embeddings.npy", lambda file: np.save(file, table))


class Startup:
    """Fills the embeddings from model.embeddings, and saves the filled model.

    It comes at every start; a run that is continued then gets its own checkpoint's weights.
    """

    def startup(self, context):
        path = self.output_dir / self.config.model.embeddings
        table = np.load(path).astype("float32")
        net = self.unwrap(self.model)
        net.weights.weight.set_value(table[:, :1])
        net.factors.weight.set_value(table[:, 1:])
        self.logger.info("filled %d embeddings from %s", len(table), path)
        self.save_model(self.output_dir / "start.safetensors")  # an init_model_path for later runs

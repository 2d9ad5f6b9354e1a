"""PaddleRec's tools/trainer.py, as far as a config.yaml and a dygraph_model.py need it."""

from importlib import import_module
from pathlib import Path

import paddle
import yaml
from paddle.io import DataLoader


def flat(section, prefix=""):
    for key, value in section.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def main(config_yaml):
    paddle.seed(12345)
    config = dict(flat(yaml.safe_load(config_yaml.read_text())))
    model_class = import_module("dygraph_model").DygraphModel()
    model = model_class.create_model(config)
    optimizer = model_class.create_optimizer(model, config)
    files = sorted((config_yaml.parent / config["runner.train_data_dir"]).iterdir())
    data = import_module(config["runner.train_reader_path"]).RecDataset(files, config=config)
    loader = DataLoader(data, batch_size=config["runner.train_batch_size"], drop_last=True)
    for epoch in range(config["runner.epochs"]):
        model.train()
        metrics, _ = model_class.create_metrics()
        for batch in loader():
            optimizer.clear_grad()
            loss, metrics, _ = model_class.train_forward(model, metrics, batch, config)
            loss.backward()
            optimizer.step()
        prefix = config_yaml.parent / Path(config["runner.model_save_path"], str(epoch), "rec")
        paddle.save(model.state_dict(), f"{prefix}.pdparams")
        paddle.save(optimizer.state_dict(), f"{prefix}.pdopt")
    return model

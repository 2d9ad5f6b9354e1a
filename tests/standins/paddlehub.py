"""What a script with the Trainer of PaddleHub 2 uses; the calls come in its order."""

import paddle
from paddle.io import BatchSampler, DataLoader, DistributedBatchSampler


class Trainer:
    def __init__(self, model, optimizer, checkpoint_dir):
        self.model, self.optimizer, self.checkpoint_dir = model, optimizer, checkpoint_dir

    def train(self, train_dataset, epochs, batch_size, eval_dataset, log_interval, save_interval):
        sampler = DistributedBatchSampler(train_dataset, batch_size=batch_size, shuffle=True)
        loader = DataLoader(train_dataset, batch_sampler=sampler)
        for epoch in range(1, epochs + 1):
            self.model.train()
            for number, batch in enumerate(loader):
                self.model.training_step(batch, number)["loss"].backward()
                self.optimizer.step()
                self.model.clear_gradients()
            if epoch % save_interval == 0:
                self.evaluate(eval_dataset, batch_size)
                self.save_model(f"{self.checkpoint_dir}/epoch_{epoch}")

    def evaluate(self, eval_dataset, batch_size):
        sampler = BatchSampler(eval_dataset, batch_size=batch_size)
        self.model.eval()
        for number, batch in enumerate(DataLoader(eval_dataset, batch_sampler=sampler)):
            self.model.validation_step(batch, number)

    def save_model(self, folder):
        paddle.save(self.model.state_dict(), f"{folder}/model.pdparams")
        paddle.save(self.optimizer.state_dict(), f"{folder}/model.pdopt")


MODULES = {"paddlehub.finetune.trainer": ["Trainer"]}

"""What a script of fastNLP's uses; the calls come in the order of its Trainer."""

import paddle

_listeners = []


class Callback:
    pass


class Metric:
    def __init__(self, backend):
        pass


class Event:
    def on_train_batch_end(every):
        return every


class Trainer:
    def __init__(self, model, optimizers, train_dataloader, n_epochs, callbacks, **options):
        self.model, self.optimizer, self.n_epochs = model, optimizers, n_epochs
        self.loader, self.callbacks, self.options = train_dataloader, callbacks, options
        self.cur_epoch_idx = self.global_forward_batches = 0

    @classmethod
    def on(cls, every):
        return lambda function: _listeners.append((every, function))

    def run(self):
        self.evaluate(limit=2)
        for _ in range(self.n_epochs):
            self.model.train()
            for batch in self.loader:
                self.model.train_step(batch)["loss"].backward()
                self.optimizer.step()
                self.optimizer.clear_grad()
                self.global_forward_batches += 1
                for every, function in _listeners:
                    if self.global_forward_batches % every == 0:
                        function(self)
            self.cur_epoch_idx += 1
            self.callbacks[0].on_train_epoch_end(self)
            self.callbacks[0].on_evaluate_end(self, self.evaluate())

    def evaluate(self, limit=None):
        (metric,) = self.options["metrics"].values()
        metric.reset()
        self.model.eval()
        with paddle.no_grad():
            for batch in [*self.options["evaluate_dataloaders"]][:limit]:
                metric.update(**self.model.evaluate_step(batch))
        return metric.get_metric()

    def save_model(self, folder, only_state_dict):
        states = {n: p.cpu().detach().clone() for n, p in self.model.state_dict().items()}
        paddle.save(states, f"{folder}/fastnlp_model.pkl.tar")


MODULES = {"fastNLP": ["Callback", "Event", "Metric", "Trainer"]}

import paddle
from paddle.io import DataLoader, TensorDataset
from expbase import ExperimentBase, main


class Line(ExperimentBase):
    def setup_dataloader(self):
        x = paddle.linspace(-1, 1, 200).reshape([-1, 1])
        data = TensorDataset([x, 3 * x + 1])
        self.train_loader = DataLoader(data, batch_size=20, shuffle=True)
        self.valid_loader = DataLoader(data, batch_size=50)

    def setup_model(self):
        self.model = self.data_parallel(paddle.nn.Linear(1, 1))
        self.optimizer = paddle.optimizer.Adam(0.02, parameters=self.model.parameters())
        self.input_spec = [paddle.static.InputSpec([None, 1])]  # for --export

    def train_batch(self):
        x, y = self.read_batch()
        loss = paddle.nn.functional.mse_loss(self.model(x), y)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for x, y in self.valid_batches():
            self.log(error=(self.model(x) - y).abs().mean())


if __name__ == "__main__":
    main(Line)

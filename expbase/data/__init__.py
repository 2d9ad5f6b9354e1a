"""The training data: loaders, the order of their batches, the place in them, workers."""

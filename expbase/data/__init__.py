"""What gives batches: loaders, the place in them, workers."""

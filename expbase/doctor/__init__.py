"""What only looks at a run and says what it sees: a guest of training, which does not know it."""

"""One start of a run: what is given, the parts, the loop, stopping, resuming."""

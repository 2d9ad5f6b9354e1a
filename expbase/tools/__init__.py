"""Tools over finished and running runs; `python -m expbase` lists them. The core knows none."""

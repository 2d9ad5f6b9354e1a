"""Several processes: what they do together, who watches, starts and stops them."""

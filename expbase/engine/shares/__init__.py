"""Updates of so many shares, whatever the number of processes: no bit depends on that."""

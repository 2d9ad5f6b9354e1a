"""What a run says and leaves behind: logs, metrics, curves, the ledger, where it came from."""

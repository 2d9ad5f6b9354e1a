"""What a start and an end of a run leave behind, for people."""

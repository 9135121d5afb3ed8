"""Reports of runs: written, read, compared, drawn."""

"""Reports of runs: writing, reading, comparing, drawing."""

"""Reports of runs: writing, reading, comparing and drawing them."""

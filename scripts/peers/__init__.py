"""Other engines for comparison, each run in an environment of its own."""

"""Command lines: flags, config files, terminal output, and the runs of decode and bench."""

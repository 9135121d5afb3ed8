"""Command lines: flags, config files, the terminal, and the decode command's run."""

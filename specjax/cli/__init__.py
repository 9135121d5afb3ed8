"""What the command lines share: flags and configs, the terminal, and the decode command's run."""

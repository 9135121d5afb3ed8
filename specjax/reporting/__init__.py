"""Write, read, compare and draw reports of runs."""

"""What lowers the acceptance of a drafter: the command doctor and `specjax.diagnosis`."""

"""Training methods: their losses, labels and initial parameters."""

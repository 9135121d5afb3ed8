"""Training methods: the losses, labels and initial parameters of each kind of drafter."""

"""Training of block drafters: blocks at random anchors, and the loss over their positions."""

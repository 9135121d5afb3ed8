"""What is trained: losses, labels, and the methods made of them."""

"""What the target is asked, and its answers as they come."""

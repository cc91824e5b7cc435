"""Speed and memory, side by side with peers."""

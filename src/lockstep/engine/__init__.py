"""The training loop and what it is assembled from."""

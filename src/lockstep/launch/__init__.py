"""Starting workers, watching them, and ending them well. Torch-free."""

"""Models, their shapes, and the way to and from Hugging Face files."""

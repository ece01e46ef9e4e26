"""Fast paths, each with a plain reference beside it."""

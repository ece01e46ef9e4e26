"""Proofs that every family and mode must pass; a new one joins by one line in a table."""

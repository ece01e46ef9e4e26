"""Tests of the cache, the order, the loader and the tokenizers."""

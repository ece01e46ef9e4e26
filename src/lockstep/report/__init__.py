"""Where records go: the terminal, events.jsonl, TensorBoard."""

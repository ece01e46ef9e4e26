"""How fast a configuration trains on this machine, where a step goes, and what more workers bring."""

"""Contract tests: what every file of a folder must keep, over the registry."""

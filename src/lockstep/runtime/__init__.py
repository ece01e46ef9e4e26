"""Where the process runs: environment, device, precision, determinism, injected faults."""

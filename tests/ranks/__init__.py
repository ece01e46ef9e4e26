"""Several processes as one run: real ranks with gloo on this machine."""

"""The loopback hub, and what lockstep does with a good one and with a bad one."""

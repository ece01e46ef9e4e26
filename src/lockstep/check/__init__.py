"""`lockstep check`: train the same thing on every GPU, compare the bits, and say of each PASS, FAIL or UNDECIDED."""

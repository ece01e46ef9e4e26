"""One file per training objective: the maths of a family."""

PARTS = ("conversations", "denoise", "likelihood", "noise")  # of an objective, and none themselves

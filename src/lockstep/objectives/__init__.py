"""One file per training objective: the maths of a family."""

"""One file per source learner: what makes the histories that are distilled. A name in a config is a file."""

PARTS = ("draws", "history", "network")  # of a learner, and none themselves

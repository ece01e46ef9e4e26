"""One file per world: small grids with many tasks, as tables. A name in a config is a file."""

PARTS = ("table", "split", "gymnasium_env", "observed")  # of every world, and none themselves

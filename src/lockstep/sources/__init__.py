"""One file per kind of data; each yields documents in a fixed order."""

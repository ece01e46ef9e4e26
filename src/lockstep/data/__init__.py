"""The token cache, the order of rows and the loader: rows in, batches out."""

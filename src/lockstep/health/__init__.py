"""Whether numbers are finite, and fingerprints to compare them by."""

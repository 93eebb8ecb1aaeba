"""The files of a run directory: records, its lock, and its mirror in a bucket."""

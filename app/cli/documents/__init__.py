"""`ponder index` and `ponder documents`: folders read into collections, here or on a server."""

"""Images: reading, processing, encoding, and the cache of what the encoder gave. See README.md."""

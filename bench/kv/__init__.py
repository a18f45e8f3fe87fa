"""Measures what is worth keeping, and where: hit rates against the clairvoyant order, and agents that wait for
tools."""

"""Measures KV cache eviction and offload: hit rates against the clairvoyant order, and agents that wait for tools."""

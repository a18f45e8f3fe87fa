"""The paged K/V cache: a pool of blocks, the prefix that each holds, eviction, and offload to host memory and disk."""

"""Where keys and values lie: the pool's blocks, which prefix each of them holds, and what is worth keeping."""

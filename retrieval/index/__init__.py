"""The indexes that search reads: dense, lexical, and both fused."""

"""Does thinking longer, sampling more or searching help? `python -m bench.reasoning`, on puzzles never trained on.

Accuracy against tokens, with Wilson's 95% intervals: budget forcing with 0 to 4 Waits, against thinking of a minimum
length and plain sampling at as many tokens; thinking cut at a maximum; best of n and self-consistency over the same
samples; trees of thoughts against best of n at as many tokens and random legal search at as many states; a cascade
from the draft model to the large one; a tree on forks against the same tree over HTTP.
"""

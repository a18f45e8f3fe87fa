"""One generator a file; each makes exchanges from a random state and a choice of phrasings.

`phrasing="train"` and `phrasing="held_out"` never share a template, so an evaluation asks in words not trained on.
"""

"""Constraints on the logits: what a span may write (spec.py), and the matchers that hold a model to it (matcher.py).

Two backends stand behind one protocol. Importing this, or anything of the engine's, needs neither one's library: they
are loaded when the first constraint comes.
"""

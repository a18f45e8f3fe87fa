"""Tools a model can call: declared by a decorator, found in packages and folders, run within limits.

Knows nothing of models, prompts or HTTP.
"""

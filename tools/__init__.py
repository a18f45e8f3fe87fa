"""Tools a model can call: declared by a decorator, found in packages and folders, run within limits.

Knows nothing of models, prompts or HTTP. Plugins import `ponder`; the server imports the modules here.
"""

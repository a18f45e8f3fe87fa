"""Makes the bundled model: tokenizer, data, training, export and evaluation, in one command.

`python -m training` remakes `models/pebble`. All data is written by the generators in `training.tasks` (and by the
standard library's own docstrings, as examples of text the model should admit it cannot follow).
"""

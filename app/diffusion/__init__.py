"""Masked diffusion over HTTP (docs/diffusion.md), where the setting `diffusion_model` names a model.

`service` has the model and the thread of its passes, `routes` answer with a stream of them.
"""

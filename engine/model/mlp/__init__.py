"""Parts of a layer beside attention that are more than one gated MLP."""

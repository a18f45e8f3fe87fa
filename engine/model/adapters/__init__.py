"""Low-rank adapters of a decoder: read as PEFT writes them, and added to the outputs of its linears."""

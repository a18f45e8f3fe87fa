"""A tokenizer of bytes: an end, a mask, and a token for each byte.

The mask is written as a character of its own, so a text shows its gaps. Small enough that a model of a million
parameters spends none of them on a vocabulary.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from training.diffusion.questions import MASK

END = "<|endoftext|>"


def byte_tokenizer() -> Tokenizer:
    """Returns the tokenizer: id 0 ends a text, id 1 is the mask, the others are bytes."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {MASK})
    vocabulary = {token: id for id, token in enumerate([END, MASK, *alphabet])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return made

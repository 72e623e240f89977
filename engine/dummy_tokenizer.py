"""The tokenizer of a folder that has a config.json and nothing else, served with --load-format dummy.

As with the weights, only the size is right. Every byte is a token, so every text can be asked for; every further id
has a text of its own, its number, so that each token drawn from random logits is seen by who measures the stream.
"""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from engine.token_bytes import byte_alphabet

_BLANK = next(character for character, byte in byte_alphabet().items() if byte == 0x20)


def dummy_backend(vocab_size: int) -> Backend:
    """Ids 0 to 255 are the bytes, id n above them is the text " n", which no text is split into. A vocabulary of less
    than 256 ids lacks the last bytes, and drops them from texts."""
    characters = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)[:vocab_size]
    vocab = {character: token_id for token_id, character in enumerate(characters)}
    vocab |= {f"{_BLANK}{token_id}": token_id for token_id in range(len(vocab), vocab_size)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend

"""Small tokenizers of every kind, made on the spot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from engine.token_bytes import byte_alphabet
from engine.tokenizer import Tokenizer

BLANK = "\u2581"


def byte_level(*, chat_template: str = "", adds_bos: bool = False) -> Tokenizer:
    """All bytes, a few merges, control tokens, one added token that is text and one that the template may use.
    Ids: 0 <|end|>, 1 <|start|>, 2.. bytes in order of their characters, "Ġa", "Ġab", "<note>", "<é>"."""
    alphabet = sorted(byte_alphabet())
    entries = ["<|end|>", "<|start|>", *alphabet, "Ġa", "Ġab"]
    vocab = {text: token_id for token_id, text in enumerate(entries)}
    backend = Backend(models.BPE(vocab, [("Ġ", "a"), ("Ġa", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    backend.add_tokens([AddedToken("<note>", normalized=False), AddedToken("<é>", normalized=False)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", vocab["<|start|>"])]
        )
    return Tokenizer(
        backend,
        bos_token_id=1,
        eos_token_ids=(0,),
        chat_templates={"default": chat_template} if chat_template else None,
        special_tokens={"bos_token": "<|start|>", "eos_token": "<|end|>"},
    )


def sentencepiece() -> Tokenizer:
    """Byte fallback, blanks as U+2581, a prefix blank."""
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    entries += [BLANK, "a", "b", "ab", BLANK + "a", BLANK + "ab", BLANK * 2]
    vocab = {text: token_id for token_id, text in enumerate(entries)}
    merges = [("a", "b"), (BLANK, "a"), (BLANK, "ab"), (BLANK, BLANK)]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, bos_token_id=1, eos_token_ids=(2,))


def word_pieces() -> Tokenizer:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "chess": 3}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


def whole_words() -> Tokenizer:
    backend = Backend(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend)


def suffixed() -> Tokenizer:
    vocab = {"lo": 0, "w</w>": 1, "er</w>": 2}
    backend = Backend(models.BPE(vocab, [], end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder()
    return Tokenizer(backend)


KINDS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "word_pieces": word_pieces,
    "whole_words": whole_words,
    "suffixed": suffixed,
}


def gguf_metadata(tokenizer_model: str, tokens: list[str], **more: Any) -> Mapping[str, Any]:
    """The tokenizer part of GGUF metadata."""
    fields = {"model": tokenizer_model, "tokens": tokens} | more
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}

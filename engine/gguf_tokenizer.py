"""A `tokenizers` object from the vocabulary in GGUF metadata, without transformers.

Two kinds of vocabulary exist in practice. "gpt2" is byte-level BPE: entries in GPT-2's byte alphabet, merges listed,
and a named rule ("pre") that cuts text into words first. "llama" is SentencePiece BPE: blanks written as U+2581,
unknown characters as byte tokens, merges implied by the entries' scores. A vocabulary of another kind, or cut by a
rule that is not known here, is refused: tokens that are slightly wrong answer slightly wrong, silently.

Built anew at every start: for a byte-level vocabulary that is faster than reading a tokenizer.json (SmolLM2: 0.06 s
against 0.09 s of CPU time), for a SentencePiece one hardly slower (Gemma 3's 262,144 entries: 1.5 s against 1.2 s).
Knows metadata keys (GGUF specification); reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.config import StartError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # token types of the specification
_BLANK = "\u2581"

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True, slots=True)
class Words:
    """How a byte-level vocabulary cuts text before merging.

    pattern: each match is a word; single_digits: every digit is one word first; nfc: text is composed first;
    whole_words: a word that is an entry needs no merges; adds_bos: BOS unless the file says otherwise.
    """

    pattern: str
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


def _cl100k(digits: str) -> str:
    return _CONTRACTIONS + "|" + _START + r"\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL


def _cased(digits: str, contraction: str) -> str:
    """Words of one case pattern: "HTTPServer" is "HTTP" and "Server"."""
    lower = _START + _UPPER + "*" + _LOWER + "+" + contraction
    upper = _START + _UPPER + "+" + _LOWER + "*" + contraction
    return lower + "|" + upper + "|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL


_GPT2 = Words(_GPT2_WORDS)
_DIGITS = Words(_GPT2_WORDS, single_digits=True)
_LLAMA3 = Words(_cl100k(r"\p{N}{1,3}"), whole_words=True, adds_bos=True)
_QWEN2 = Words(_cl100k(r"\p{N}"), nfc=True)
_GPT4O = Words(_cased(r"\p{N}{1,3}", _CONTRACTIONS + "?"))
_TEKKEN = Words(_cased(r"\p{N}", ""), whole_words=True, adds_bos=True)

WORDS: dict[str, Words] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "trillion"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Words(_cl100k(r"\p{N}{1,3}"))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "tekken": _TEKKEN,
}


def build_backend(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `metadata` describes, special tokens and BOS/EOS rule included. Raises StartError."""
    tokens, types = _entries(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            backend, adds_bos = _byte_level(metadata, tokens)
        elif kind == "llama":
            backend, adds_bos = _sentencepiece(metadata, tokens, types), True
        else:
            raise StartError(f"GGUF vocabularies of the kind {str(kind)[:40]!r} are not supported (gpt2, llama are).")
        _add_tokens(backend, tokens, types)
        _add_ends(backend, metadata, tokens, adds_bos)
    except StartError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise StartError(f"The GGUF file's vocabulary is broken: {str(error)[:200]}.") from error
    return backend


def _entries(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Texts and types of the vocabulary, without the rows at its end that only pad the matrix and have no text."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise StartError("The GGUF file has no vocabulary.")
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise StartError("The GGUF file's vocabulary is broken: its tokens and their types do not match.")
    end = len(tokens)
    while end > 1 and types[end - 1] == _UNUSED:
        end -= 1
    return tokens[:end], types[:end]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    words = WORDS.get(name)
    if words is None:
        raise StartError(f"The GGUF file cuts words by a rule that is not known: {str(name)[:40]!r}.")
    listed = metadata.get("tokenizer.ggml.merges") or []
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in listed)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=words.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if words.single_digits else []
    steps.append(pre_tokenizers.Split(Regex(words.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if words.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, words.adds_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    # Runs of blanks are stored as blanks; text reaches the merges with U+2581 in their place.
    spelled = [_BLANK * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens]
    vocab = {token: token_id for token_id, token in enumerate(spelled)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    scores = metadata.get("tokenizer.ggml.scores", [])
    if len(scores) < len(tokens):
        raise StartError("The GGUF file's vocabulary is broken: it has more tokens than scores.")
    merges = implied_merges(spelled, scores, types)
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=spelled[unknown], fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", _BLANK)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_BLANK))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence([decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def implied_merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Merges of a SentencePiece vocabulary, first one first: every way to put an entry together from two entries,
    entries with the best score first. Entries without a score of their own (user-defined ones) rank by position,
    before all others, as the vocabulary lists them."""
    known = set(tokens)
    best = max(scores, default=0.0) + 1.0
    order = sorted(
        (token_id for token_id, kind in enumerate(types) if kind in (_NORMAL, _USER_DEFINED)),
        key=lambda token_id: -(best if types[token_id] == _USER_DEFINED else scores[token_id]),
    )
    merges = []
    for token_id in order:
        token = tokens[token_id]
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in known and (right := token[cut:]) in known:
                merges.append((left, right))
    return merges


def _add_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens (and the unknown one) are recognised as whole texts and are special; user-defined ones are
    recognised and are text."""
    added = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token and backend.token_to_id(token) is not None
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _add_ends(backend: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], adds_bos: bool) -> None:
    """BOS before and EOS after every text, as the file says."""
    template, special = ["$A"], []
    for name, at_start, wanted in (("bos", True, adds_bos), ("eos", False, False)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            continue
        if metadata.get(f"tokenizer.ggml.add_{name}_token", wanted):
            template.insert(0 if at_start else len(template), tokens[token_id])
            special.append((tokens[token_id], token_id))
    if special:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)

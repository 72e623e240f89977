"""Opens the tokenizer that belongs to a model: from a folder's JSON files or from GGUF metadata.

Also gathers what else speaks of tokens there: the chat templates, the texts of BOS, EOS and their like, and the ids
that end a text, which models spread over up to four places. Whether a text gets a BOS is what tokenizer.json's
post-processor says; add_bos_token in tokenizer_config.json does not count, as in transformers 5.

No torch, no transformers, no code from the folder: a tokenizer that exists as Python code or as a SentencePiece model
only is refused with the way to convert it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from engine.config import StartError
from engine.dummy_tokenizer import dummy_backend
from engine.gguf_tokenizer import build_backend
from engine.models.config_facts import eos_ids
from engine.models.source import Source, read_json, read_text
from engine.tokenizer import Tokenizer

_TEXTS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_GGUF_TEXTS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Ends of a turn that older GGUF files have no metadata for; one counts only if the chat template writes it.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>")


def open_tokenizer(
    source: Source,
    *,
    hf_config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    gguf_metadata: Mapping[str, Any] | None = None,
    may_make_one: bool = False,
) -> Tokenizer:
    """The tokenizer of `source`; hf_config and generation_config contribute end-of-sequence ids, gguf_metadata is
    that of the opened file where `source` is one. may_make_one: a folder without any gets one of the config's size, to
    go with dummy weights. Raises StartError."""
    inner = hf_config.get("text_config")
    named = (
        generation_config.get("eos_token_id"),
        hf_config.get("eos_token_id"),
        inner.get("eos_token_id") if isinstance(inner, Mapping) else None,
    )
    if source.kind == "gguf":
        if gguf_metadata is None:
            raise ValueError("a GGUF file's tokenizer needs its metadata")
        return _from_gguf(gguf_metadata, named)
    if may_make_one and not (source.path / "tokenizer.json").is_file():
        text_config = inner if isinstance(inner, Mapping) else hf_config
        return _made_up(text_config.get("vocab_size"), named)
    return _from_folder(source.path, named)


def _made_up(vocab_size: Any, named: tuple[Any, ...]) -> Tokenizer:
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise StartError(f"config.json gives no size of the vocabulary, but vocab_size = {vocab_size!r}.")
    return Tokenizer(dummy_backend(vocab_size), eos_token_ids=eos_ids(*named))


def _from_gguf(metadata: Mapping[str, Any], named: tuple[Any, ...]) -> Tokenizer:
    backend = build_backend(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    texts = {}
    for key, name in _GGUF_TEXTS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            texts[name] = tokens[token_id]
    templates = {
        key.removeprefix("tokenizer.chat_template").lstrip(".") or "default": value
        for key, value in metadata.items()
        if (key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")) and isinstance(value, str)
    }
    turn_ends = [backend.token_to_id(text) for text in _TURN_ENDS if text in templates.get("default", "")]
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return Tokenizer(
        backend,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=eos_ids(*named, *ends, *turn_ends),
        chat_templates=templates,
        special_tokens=texts,
    )


def _from_folder(folder: Path, named: tuple[Any, ...]) -> Tokenizer:
    backend = _backend(folder)
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    map_path = folder / "special_tokens_map.json"
    fallback = read_json(map_path) if map_path.is_file() else {}
    texts = {}
    for name in _TEXTS:
        text = _text(config.get(name)) or _text(fallback.get(name))
        if text is not None:
            texts[name] = text
    bos, eos = (backend.token_to_id(texts[name]) if name in texts else None for name in ("bos_token", "eos_token"))
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=eos_ids(*named, eos),
        chat_templates=dict(_templates(folder, config)),
        special_tokens=texts,
    )


def _backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        older = [name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (folder / name).is_file()]
        raise StartError(
            f"{folder} has no tokenizer.json"
            + (
                f", only {' and '.join(older)}: write one with transformers' AutoTokenizer.save_pretrained."
                if older
                else "."
            )
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever is wrong
        raise StartError(f"Cannot read {path}: {str(error).splitlines()[0][:200]}.") from error
    backend.no_truncation()  # settings of somebody's training run that some files carry along
    backend.no_padding()
    return backend


def _templates(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, Jinja source), later ones count: the config's, then the files that newer transformers write."""
    listed = config.get("chat_template")
    if isinstance(listed, str):
        yield "default", listed
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            yield entry["name"], entry["template"]
    older = folder / "chat_template.json"
    if older.is_file() and isinstance(source := read_json(older).get("chat_template"), str):
        yield "default", source
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        yield path.stem, _read_text(path)
    if (folder / "chat_template.jinja").is_file():
        yield "default", _read_text(folder / "chat_template.jinja")


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"Cannot read {path}: {error}.") from error


def _text(value: Any) -> str | None:
    """A special token is stored as its text or as an object with it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None

"""Tokenizers from GGUF metadata: fixed ids for the two real models, and every rule on small vocabularies.

The fixed ids were compared once with what transformers 5.24 makes of the same files, over these texts and 20,000
random mixtures: equal for Gemma 3; equal for SmolLM2 but for digits, which transformers' conversion does not split,
and which SmolLM2's own tokenizer.json (Digits, then ByteLevel) does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from engine.config import StartError
from engine.gguf_tokenizer import WORDS, build_backend, implied_merges
from engine.models.gguf import GgufFile
from engine.models.source import Source
from engine.token_bytes import byte_alphabet
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import open_tokenizer
from tests.engine.vocabularies import BLANK, gguf_metadata
from tests.models import MODELS, model_file

# text, ids in SmolLM2, ids in Gemma 3
GOLDEN: list[tuple[str, list[int], list[int]]] = [
    ("Hello world", [19556, 905], [2, 9259, 1902]),
    (
        " 2024-11-29, 3.14159 \xbd\u0663",
        [216, 34, 32, 34, 36, 29, 33, 33, 29, 34, 41, 28, 216, 35, 30, 33, 36, 33, 37, 41, 216, 16738, 164, 113],
        [
            2,
            236743,
            236778,
            236771,
            236778,
            236812,
            236772,
            236770,
            236770,
            236772,
            236778,
            236819,
            236764,
            236743,
            236800,
            236761,
            236770,
            236812,
            236770,
            236810,
            236819,
            47041,
            242044,
        ],
    ),
    (
        "  two   three    four\n\n\n\tx\r\n",
        [216, 827, 256, 1296, 333, 1876, 16506, 197, 104, 2738],
        [2, 138, 13498, 139, 19891, 140, 19025, 109, 255968, 236781, 251, 107],
    ),
    (
        "P\u0159\xedli\u0161 \u017elu\u0165ou\u010dk\xfd k\u016f\u0148",
        [64, 144, 243, 6160, 1418, 20848, 18811, 139, 1374, 144, 115, 279, 30033, 91, 47546, 501, 144, 124, 144, 226],
        [2, 236791, 16549, 118320, 8023, 6357, 208991, 237120, 75500, 620, 237872, 238759],
    ),
    (
        "\u65e5\u672c\u8a9e\u3001\u6f22\u5b57\u3002",
        [23274, 115, 40993, 179, 120, 248, 29917, 177, 137, 112, 36518, 19076],
        [2, 94951, 236951, 201637, 236924],
    ),
    (
        "\U0001f642\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3f3\ufe0f\u200d\U0001f308",
        [
            10813,
            38887,
            10813,
            235,
            119,
            321,
            231,
            10813,
            235,
            119,
            321,
            231,
            10813,
            235,
            117,
            10813,
            233,
            128,
            31752,
            321,
            231,
            10813,
            230,
            226,
        ],
        [2, 240731, 243767, 237243, 243767, 237243, 244814, 248177, 238178, 237243, 243712],
    ),
    (
        "def f(x):\n    return x**2  # it's\n",
        [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 357, 506, 198],
        [
            2,
            2063,
            517,
            236769,
            236781,
            1473,
            107,
            140,
            2060,
            1123,
            1018,
            236778,
            138,
            236865,
            625,
            236789,
            236751,
            107,
        ],
    ),
    (
        "<|im_start|>user\nHi<|im_end|>\n<start_of_turn>",
        [1, 4093, 198, 26843, 2, 198, 44, 3738, 79, 1714, 79, 20589, 46],
        [
            2,
            236820,
            236909,
            548,
            236779,
            3041,
            111038,
            2364,
            107,
            10979,
            236820,
            236909,
            548,
            236779,
            643,
            111038,
            107,
            105,
        ],
    ),
    (
        "\xa0\u2028\x00\u200b e\u0301",
        [15442, 321, 118, 190, 321, 229, 297, 151, 219],
        [2, 432, 398, 464, 366, 406, 238, 237141, 545, 238288],
    ),
]


@pytest.fixture(scope="module", params=sorted(MODELS))
def real(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    path = model_file(request.param)
    metadata = GgufFile(path).metadata
    source = Source("m", "m", "gguf", path)
    return request.param, open_tokenizer(source, hf_config={}, generation_config={}, gguf_metadata=metadata)


@pytest.mark.model
def test_ids_of_real_models(real: tuple[str, Tokenizer]) -> None:
    name, tokenizer = real
    column = {"smollm2": 1, "gemma3": 2}[name]
    for row in GOLDEN:
        ids = tokenizer.encode(row[0], allow_special=True)
        assert ids == row[column], row[0]
        assert tokenizer.decode(ids[1:] if name == "gemma3" else ids, skip_special_tokens=False) == row[0]


@pytest.mark.model
def test_facts_of_real_models(real: tuple[str, Tokenizer]) -> None:
    name, tokenizer = real
    if name == "smollm2":
        assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2,))
        assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
        assert "<|im_start|>" in (tokenizer.chat_template or "")
        assert tokenizer.encode("") == []
    else:
        assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (262144, 2, (1,))
        assert tokenizer.encode("") == [2]
        assert tokenizer.encode("<bos>x", allow_special=True) == tokenizer.encode("x")
    ids = range(tokenizer.vocab_size + 64)
    assert len(tokenizer.decode(ids, skip_special_tokens=False)) > tokenizer.vocab_size


# ---- rules on small vocabularies

ALPHABET = sorted(byte_alphabet())


def byte_level(pre: str, *, merges: tuple[str, ...] = (), **more: Any) -> Backend:
    entries = ["<|end|>", *ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    types = [3] + [1] * (len(entries) - 1)
    fields: dict[str, Any] = {"pre": pre, "merges": list(merges), "token_type": types, "eos_token_id": 0} | more
    return build_backend(gguf_metadata("gpt2", entries, **fields))


def words(pre: str, text: str) -> list[str]:
    """The words that `text` is cut into, as the pre-tokenizer sees them."""
    backend = byte_level(pre)
    alphabet = byte_alphabet()
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(alphabet[char] for char in piece).decode() for piece, _ in pieces]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "Hi there 123!", ["Hi", " there", " 123", "!"]),
        ("smollm", "Hi there 123!", ["Hi", " there", " ", "1", "2", "3", "!"]),
        ("llama-bpe", "Hi there 12345!\n", ["Hi", " there", " ", "123", "45", "!\n"]),
        ("qwen2", "It'S 12\n\n x", ["It", "'S", " ", "1", "2", "\n\n", " x"]),
        ("gpt-4o", "HTTPServer's", ["HTTPServer's"]),
        ("gpt-4o", "camelCase 1234", ["camel", "Case", " ", "123", "4"]),
        ("tekken", "camelCase's 12", ["camel", "Case", "'s", " ", "1", "2"]),
    ],
)
def test_how_words_are_cut(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


def test_smollm_equals_digits_then_byte_level() -> None:
    own = byte_level("smollm")
    published = byte_level("smollm")
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in (row[0] for row in GOLDEN):
        assert own.pre_tokenizer.pre_tokenize_str(text) == published.pre_tokenizer.pre_tokenize_str(text)


@pytest.mark.parametrize("pre", sorted(WORDS))
def test_every_rule_loses_nothing(pre: str) -> None:
    tokenizer = Tokenizer(byte_level(pre))
    for text in (row[0] for row in GOLDEN):
        composed = text.replace("e\u0301", "é") if WORDS[pre].nfc else text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == composed


def test_a_whole_word_needs_no_merges_where_the_rule_says_so() -> None:
    merges = ("a b", "ab c")
    for pre, expected in (("llama-bpe", 1), ("qwen2", 1)):
        assert len(byte_level(pre, merges=merges).encode("abc", add_special_tokens=False).ids) == expected
    entries = ["<|end|>", *ALPHABET, "xyz"]
    fields: dict[str, Any] = {"merges": [], "token_type": [3] + [1] * (len(entries) - 1)}
    lengths = {}
    for pre in ("llama-bpe", "qwen2"):
        backend = build_backend(gguf_metadata("gpt2", entries, pre=pre, **fields))
        lengths[pre] = len(backend.encode("xyz", add_special_tokens=False).ids)
    assert lengths == {"llama-bpe": 1, "qwen2": 3}


def test_ends_of_a_text() -> None:
    bos = ALPHABET.index("B") + 1
    assert byte_level("gpt-2", bos_token_id=bos).encode("").ids == []
    assert byte_level("llama-bpe", bos_token_id=bos).encode("").ids == [bos]
    assert byte_level("llama-bpe", bos_token_id=bos, add_bos_token=False).encode("").ids == []
    both = byte_level("gpt-2", bos_token_id=bos, add_bos_token=True, add_eos_token=True)
    assert both.encode("").ids == [bos, 0]
    assert both.encode("", add_special_tokens=False).ids == []


def test_rows_that_pad_the_vocabulary_have_no_text() -> None:
    entries = ["<|end|>", *ALPHABET, "[PAD257]", "[PAD258]"]
    types = [3] + [1] * len(ALPHABET) + [5, 5]
    tokenizer = Tokenizer(build_backend(gguf_metadata("gpt2", entries, pre="gpt-2", merges=[], token_type=types)))
    assert tokenizer.vocab_size == 1 + len(ALPHABET)
    assert tokenizer.decode([257, 258], skip_special_tokens=False) == ""


def sentencepiece(**more: Any) -> Backend:
    entries = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    entries += [BLANK, "a", "b", "c", "ab", "bc", "abc", "  ", "<tool>"]
    types = [2, 3] + [6] * 256 + [1] * 7 + [4, 4]
    scores = [0.0] * 258 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -1000.0, -1000.0]
    fields: dict[str, Any] = {"token_type": types, "scores": scores, "bos_token_id": 1} | more
    return build_backend(gguf_metadata("llama", entries, **fields))


def test_sentencepiece_rules() -> None:
    assert sentencepiece().encode("ab").tokens == ["<s>", BLANK, "ab"]
    bare = sentencepiece(add_space_prefix=False, add_bos_token=False)
    assert bare.encode("abcbab").tokens == ["abc", "b", "ab"]
    assert bare.encode("a   b").tokens == ["a", BLANK * 2, BLANK, "b"]
    assert bare.encode("a<tool>é").tokens == ["a", "<tool>", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer(bare)
    assert tokenizer.decode(tokenizer.encode("a   b<tool>é")) == "a   b<tool>é"


def test_implied_merges_put_the_best_score_first() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    merges = implied_merges(tokens, [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0], [1] * 6)
    assert merges == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]


def test_the_turn_ends_of_the_template_end_a_text() -> None:
    entries = ["</s>", "<|im_end|>", "<|eot_id|>", *ALPHABET]
    metadata = {
        **gguf_metadata("gpt2", entries, pre="gpt-2", merges=[], token_type=[3, 3, 3] + [1] * 256, eos_token_id=0),
        "tokenizer.chat_template": "{{ x }}<|im_end|>",
    }
    source = Source("m", "m", "gguf", Path("m.gguf"))
    open_with: dict[str, Any] = {"hf_config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [7, 5]}}
    tokenizer = open_tokenizer(source, gguf_metadata=metadata, **open_with)
    assert tokenizer.eos_token_ids == (7, 5, 0, 1)


@pytest.mark.parametrize("kind", ["bert", None, 3])
def test_other_kinds_are_refused(kind: Any) -> None:
    with pytest.raises(StartError, match="not supported"):
        build_backend({"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["a"]})

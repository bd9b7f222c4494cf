"""How the byte-level BPE vocabularies that GGUF files name (`tokenizer.ggml.pre`) cut text before merging.

GGUF stores the name of the rule, not the rule. The rules are those of the models' own `tokenizer.json` files,
the names those of llama.cpp. A vocabulary used with another rule gives other ids without any error, so a name
that is not in this table is refused, and a missing one is taken as `default`, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from mainspring.models.errors import ModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns applied one after the other, each to the pieces that the one before left.

    `ignore_merges`: a piece that is a token as a whole is that token. `add_bos`: the beginning-of-sequence id
    is prepended unless the file says otherwise. `nfc`: text is brought to Unicode normal form C first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}" + _TAIL
_CASED_LEAD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CASED_FOLLOW = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SLASH_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = f"{_CASED_LEAD}|{_CASED_FOLLOW}|\\p{{N}}{_SLASH_TAIL}"
_GPT_4O = f"{_CASED_LEAD}{_CONTRACTIONS}?|{_CASED_FOLLOW}{_CONTRACTIONS}?|\\p{{N}}{{1,3}}{_SLASH_TAIL}"
_DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_llama3_plain = PreTokenizer((_LLAMA3,))
_qwen2 = PreTokenizer((_QWEN2,), nfc=True)
_gpt2 = PreTokenizer((_GPT2,))
_digits_gpt2 = PreTokenizer((_DIGIT, _GPT2))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _llama3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _llama3_plain),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _qwen2),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "gigachat"), _gpt2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _digits_gpt2
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_GPT_4O,)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_3)),
}


def pre_tokenizer(name: str | None, origin: str) -> PreTokenizer:
    """The rule that a GGUF file names; raises `ModelError` for one that is not known."""
    if not name:
        logger.warning(
            "%s does not say how its tokenizer cuts text (tokenizer.ggml.pre); taking 'default', which may "
            "give wrong ids. Convert the model again with a current llama.cpp.",
            origin,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{origin} names the pre-tokenizer {name!r}, which is not known, and any other would give wrong "
            f"token ids; known are {', '.join(PRE_TOKENIZERS)}. Use the model's Hugging Face folder instead"
        )
    return PRE_TOKENIZERS[name]

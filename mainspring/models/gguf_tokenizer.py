"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library."""

from __future__ import annotations

from typing import Any

from mainspring.models.errors import ModelError
from mainspring.models.gguf_file import GgufFile
from mainspring.models.pretokenizers import pre_tokenizer

# Values of `tokenizer.ggml.token_type`.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"


def gguf_tokenizer(file: GgufFile) -> Any:
    """A `transformers` tokenizer with the file's vocabulary, pre-tokenizer, special tokens and chat template.

    Covers byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`) vocabularies. Raises `ModelError` for
    another kind, a pre-tokenizer that is not known, or a damaged vocabulary.
    """
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    kind = str(file.get("tokenizer.ggml.model"))
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(f"{file.path} has {len(tokens)} tokens but {len(types)} token types; the file is damaged")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, add_bos = _sentence_piece(file, tokens, types), True
    else:
        raise ModelError(f"{file.path} has a tokenizer of kind {kind!r}; supported in GGUF are gpt2 and llama")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_CONTROL, _UNKNOWN)
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == _USER_DEFINED
        ]
    )
    named = _special_names(file, tokens)
    bos = named.get("bos_token") if file.get("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = named.get("eos_token") if file.get("tokenizer.ggml.add_eos_token", False) else None
    if bos or eos:
        added = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys((bos, eos)) if token],
        )
        # Byte-level BPE keeps its own step, which would otherwise be replaced.
        tokenizer.post_processor = (
            processors.Sequence([tokenizer.post_processor, added]) if tokenizer.post_processor else added
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=int(file.get(f"{file.architecture}.context_length", int(1e30))),
        **named,
    )
    template = file.get("tokenizer.chat_template", None)
    if template:
        wrapped.chat_template = template
    return wrapped


def _special_names(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    """`bos_token` and the like, for those that the file names."""
    named = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.get(f"tokenizer.ggml.{theirs}_token_id", None)
        if index is None:
            continue
        if not 0 <= int(index) < len(tokens):
            raise ModelError(
                f"{file.path} gives {theirs}_token_id {index} in a vocabulary of {len(tokens)}; the file is damaged"
            )
        named[f"{ours}_token"] = tokens[int(index)]
    return named


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Any, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    rule = pre_tokenizer(file.get("tokenizer.ggml.pre", None), str(file.path))
    merges: list[str] = file.get("tokenizer.ggml.merges")
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [merge.partition(" ")[::2] for merge in merges]
    for pair in pairs:  # which the library would answer with a panic that is no Exception
        if not all(part in vocab for part in (*pair, "".join(pair))):
            raise ModelError(f"{file.path} has merges that do not fit its vocabulary ({pair!r}); the file is damaged")
    try:
        model = models.BPE(
            vocab=vocab,
            merges=pairs,
            ignore_merges=rule.ignore_merges,
        )
    except Exception as error:
        raise ModelError(f"{file.path} has merges that do not fit its vocabulary ({error})") from error
    tokenizer = Tokenizer(model)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _sentence_piece(file: GgufFile, tokens: list[str], types: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] = file.get("tokenizer.ggml.scores")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges_from_scores(tokens, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece BPE has only scores: two pieces whose join is a piece may merge, best score first."""
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for index, token in enumerate(tokens):
        if types[index] in (_CONTROL, _UNKNOWN):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[index], ids[left], ids[right], left, right))
    found.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in found]

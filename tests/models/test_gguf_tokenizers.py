"""Tokenizers rebuilt from GGUF files cut text as the model's own do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from mainspring.models.errors import ModelError
from mainspring.models.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from mainspring.models.source import resolve
from mainspring.models.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def write(path: Path, kind: str, tokens: list[str], types: list[int], **values: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(0 if kind == "gpt2" else 1)
    writer.add_eos_token_id(values.get("eos", 1 if kind == "gpt2" else 2))
    if "merges" in values:
        writer.add_token_merges(values["merges"])
    if "scores" in values:
        writer.add_token_scores(values["scores"])
    if values.get("pre") is not None:
        writer.add_tokenizer_pre(values["pre"])
    if "add_bos" in values:
        writer.add_add_bos_token(values["add_bos"])
    if "add_eos" in values:
        writer.add_add_eos_token(values["add_eos"])
    if "space" in values:
        writer.add_add_space_prefix(values["space"])
    if "template" in values:
        writer.add_chat_template(values["template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(path: Path, pre: str | None, **values: Any) -> Any:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|begin|>", "<|end|>", "<user>", *sorted(ByteLevel.alphabet()), "ab", "Ġab", "12", "abc"]
    types = [CONTROL, CONTROL, USER, *[NORMAL] * (len(tokens) - 3)]
    merges = ["a b", "Ġ ab", "1 2"]
    return load_tokenizer(resolve(write(path, "gpt2", tokens, types, merges=merges, pre=pre, **values)))


def pieces(tokenizer: Any, text: str) -> list[str]:
    """What the pre-tokenizer makes of `text`, in readable form."""
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut]


TEXT = "I'll pay 12345$ now,\n\n  THAN'KS"
EXPECTED = {
    "gpt-2": ["I", "'ll", " pay", " 12345", "$", " now", ",", "\n\n ", " THAN", "'", "KS"],
    "smollm": [
        "I",
        "'ll",
        " pay",
        " ",
        "1",
        "2",
        "3",
        "4",
        "5",
        "$",
        " now",
        ",",
        "\n\n ",
        " THAN",
        "'",
        "KS",
    ],
    "qwen2": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "$", " now", ",\n\n", " ", " THAN", "'KS"],
    "llama-bpe": ["I", "'ll", " pay", " ", "123", "45", "$", " now", ",\n\n", " ", " THAN", "'KS"],
    "tekken": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "$", " now", ",\n\n", " ", " THAN", "'KS"],
    "gpt-4o": ["I'll", " pay", " ", "123", "45", "$", " now", ",\n\n", " ", " THAN", "'KS"],
    "default": ["I", "'", "ll", " pay", " ", "123", "45", "$", " now", ",", "\n\n ", " THAN", "'", "KS"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_text_is_cut_as_the_named_pre_tokenizer_cuts_it(name: str, tmp_path: Path) -> None:
    assert pieces(byte_level(tmp_path / "t.gguf", name), TEXT) == EXPECTED[name]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text_whole(name: str, tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "t.gguf", name, add_bos=False)
    text = "  Été 2024: naïve—日本語 ½ x²\r\n\t\tdef f(a_b):  # 😊\n 1e-5 don't DON'T  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_qwen2_cuts_like_the_tokenizer_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    ours = byte_level(tmp_path / "t.gguf", "qwen2")
    theirs = Qwen2Tokenizer(vocab=ours.get_vocab(), merges=[("a", "b")])
    for text in (TEXT, "x=1+2;\n\n\treturn  y", "Ωmega 12 3", "don't  STOP"):
        assert pieces(ours, text) == pieces(theirs, text)


def test_an_unknown_pre_tokenizer_is_refused_and_a_missing_one_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelError, match=r"'klingon'.*known are default, llama3"):
        byte_level(tmp_path / "t.gguf", "klingon")
    with caplog.at_level(logging.WARNING):
        assert pre_tokenizer(None, "m.gguf") is PRE_TOKENIZERS["default"]
    assert "m.gguf" in caplog.text and "tokenizer.ggml.pre" in caplog.text


def test_whole_pieces_that_are_tokens_win_over_merges_only_where_the_rule_says(tmp_path: Path) -> None:
    merged = byte_level(tmp_path / "a.gguf", "qwen2")
    whole = byte_level(tmp_path / "b.gguf", "llama-bpe", add_bos=False)
    assert merged.convert_ids_to_tokens(merged.encode("abc")) == ["ab", "c"]
    assert whole.convert_ids_to_tokens(whole.encode("abc")) == ["abc"]


def test_bos_and_eos_follow_the_rule_and_the_files_flags(tmp_path: Path) -> None:
    def ends(pre: str, **flags: bool) -> list[int]:
        return byte_level(tmp_path / "t.gguf", pre, **flags).encode("ab")

    plain = ends("qwen2")
    assert len(plain) == 1
    assert ends("llama-bpe") == [0, *plain]
    assert ends("llama-bpe", add_bos=False) == plain
    assert ends("qwen2", add_bos=True, add_eos=True) == [0, *plain, 1]


def test_special_tokens_in_text_are_recognised_and_can_be_skipped(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "t.gguf", "qwen2")
    ids = tokenizer.encode("<|begin|>ab<user>ab<|end|>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|begin|>", "ab", "<user>", "ab", "<|end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<user>ab"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|end|>")


def test_the_chat_template_comes_with_the_file(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = byte_level(tmp_path / "t.gguf", "qwen2", template=template)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab<|end|>"


def sentence_piece(path: Path, **values: Any) -> Any:
    pieces_ = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *pieces_]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces_)]
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -6.0, -4.0, -3.0, -2.0, -1.0]
    return load_tokenizer(resolve(write(path, "llama", tokens, types, scores=scores, **values)))


def test_sentence_piece_merges_the_best_score_first_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path / "t.gguf")
    assert tokenizer.tokenize("ab ab") == ["▁ab", "▁ab"]
    assert tokenizer.tokenize("abc") == ["▁a", "bc"]
    assert tokenizer.tokenize("é") == ["▁", "<0xC3>", "<0xA9>"]
    ids = tokenizer.encode("ab  é\nabc")
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab  é\nabc"


def test_sentence_piece_honours_the_space_and_bos_flags(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path / "t.gguf", space=False, add_bos=False)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab ab")) == ["ab", "▁ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_other_vocabularies_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gguf", "bert", ["a"], [1])
    with pytest.raises(ModelError, match="'bert'; supported in GGUF are gpt2 and llama"):
        load_tokenizer(resolve(path))
    path = write(tmp_path / "u.gguf", "gpt2", ["a", "b"], [1, 1], merges=["a z"], pre="gpt-2")
    with pytest.raises(ModelError, match="merges that do not fit"):
        load_tokenizer(resolve(path))
    path = write(tmp_path / "v.gguf", "gpt2", ["a", "b", "ab"], [1] * 3, merges=["a b"], pre="gpt-2", eos=9)
    with pytest.raises(ModelError, match="eos_token_id 9 in a vocabulary of 3"):
        load_tokenizer(resolve(path))


@pytest.mark.parametrize("merges", [["a c"], ["zz b"], ["ab"], [""], ["a b c"]])
def test_merges_outside_the_vocabulary_are_a_model_error(tmp_path: Path, merges: list[str]) -> None:
    path = write(
        tmp_path / "t.gguf", "gpt2", ["<s>", "</s>", "a", "b", "c", "ab"], [NORMAL] * 6, merges=merges, pre="gpt-2"
    )
    with pytest.raises(ModelError, match="damaged"):
        load_tokenizer(resolve(path))


def test_numbers_that_are_no_numbers_are_a_model_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gguf", "llama", ["<unk>", "<s>", "</s>", "a"], [UNKNOWN, CONTROL, CONTROL, NORMAL])
    with pytest.raises(ModelError, match="damaged|lacks|incomplete"):
        load_tokenizer(resolve(path))
    source = resolve(path)
    source.gguf.metadata["tokenizer.ggml.scores"] = ["x"] * 4
    source.gguf.metadata["tokenizer.ggml.bos_token_id"] = "one"
    with pytest.raises(ModelError, match="cannot be understood"):
        load_tokenizer(source)


def test_folders_bring_their_own_tokenizer_and_refuse_code(
    llama_folder: Path, tmp_path: Path, change_json: Any
) -> None:
    with pytest.raises(ModelError, match=r"no usable tokenizer .*add its tokenizer\.json"):
        load_tokenizer(resolve(llama_folder))
    template = "{{ messages[0].content }}!"
    saved = byte_level(tmp_path / "t.gguf", "smollm", template=template)
    saved.save_pretrained(llama_folder)
    loaded = load_tokenizer(resolve(llama_folder))
    assert loaded.encode("ab 12") == saved.encode("ab 12")
    assert loaded.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab!"
    change_json(llama_folder / "tokenizer_config.json", lambda c: c.update(auto_map={"AutoTokenizer": ["x.X", None]}))
    with pytest.raises(ModelError, match="auto_map"):
        load_tokenizer(resolve(llama_folder))

"""Detokenizer: what is streamed is what a whole decode gives, cut at the first stop string."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mainspring.engine.detokenizer import Detokenizer, TextStream, TokenDecoder
from mainspring.engine.sampling_params import SamplingParams

ALPHABET_IDS = [33203, 23960, 57, 58, 59, 34519, 62, 7627]  # DEF GH I J K LM N OP
STARS_IDS = [10813, 230, 249] * 3  # 🌟🌟🌟
END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> PreTrainedTokenizerBase:
    loaded = AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    assert isinstance(loaded, PreTrainedTokenizerBase)
    return loaded


@pytest.fixture(scope="module")
def decoder(tokenizer: PreTrainedTokenizerBase) -> TokenDecoder:
    return TokenDecoder(tokenizer)


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerBase:
    """A tokenizer in the manner of Llama 2: word marks, a dropped first space, bytes for what it lacks."""
    words = ["▁Hello", "▁world", "▁", "a", "é", "\ufffd", "!"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + index for index, word in enumerate(words)}
    inner = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def whole_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip: bool = True) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def streamed(detokenizer: Detokenizer, ids: Sequence[int], chunk: int = 1) -> Iterator[str]:
    """What is new in ``text`` after each push; text that was shown must stay as it was."""
    shown = ""
    for start in range(0, len(ids), chunk):
        detokenizer.push(ids[start : start + chunk], finished=start + chunk >= len(ids))
        assert detokenizer.text.startswith(shown)
        yield detokenizer.text[len(shown) :]
        shown = detokenizer.text
        if detokenizer.finished:
            return


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return end, max(here, key=len)
    return None


def test_an_emoji_of_three_tokens_is_streamed_whole(decoder: TokenDecoder) -> None:
    pieces = list(streamed(Detokenizer(decoder, SamplingParams()), STARS_IDS))
    assert pieces == ["", "", "🌟"] * 3


def test_an_answer_that_ends_inside_a_character_is_streamed_as_it_is_decoded(
    decoder: TokenDecoder, tokenizer: PreTrainedTokenizerBase
) -> None:
    pieces = list(streamed(Detokenizer(decoder, SamplingParams()), STARS_IDS[:8]))
    assert "".join(pieces) == whole_text(tokenizer, STARS_IDS[:8]) == "🌟🌟\ufffd"
    assert "\ufffd" not in "".join(pieces[:-1])


@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [("FG", "DE", 2), ("DE", "", 1), ("EFGHIJ", "D", 4), ("LMN", "DEFGHIJK", 7), ("F", "DE", 1)],
)
def test_a_stop_string_inside_a_token_or_across_tokens_is_cut(
    decoder: TokenDecoder, stop: str, text: str, tokens: int, chunk: int
) -> None:
    detokenizer = Detokenizer(decoder, SamplingParams(stop=stop))
    assert "".join(streamed(detokenizer, ALPHABET_IDS, chunk)) == text
    assert (detokenizer.stop_string, detokenizer.num_tokens) == (stop, tokens)


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_decided(decoder: TokenDecoder) -> None:
    held = Detokenizer(decoder, SamplingParams(stop="FGX"))
    assert list(streamed(held, ALPHABET_IDS[:3])) == ["DE", "FGH", "I"]
    undecided = Detokenizer(decoder, SamplingParams(stop="FGHIZ"))
    assert list(streamed(undecided, ALPHABET_IDS[:3])) == ["DE", "", "FGHI"]


def test_a_stop_string_may_stay_in_the_text_and_then_nothing_is_held(decoder: TokenDecoder) -> None:
    params = SamplingParams(stop=["FG"], include_stop_str_in_output=True)
    detokenizer = Detokenizer(decoder, params)
    assert list(streamed(detokenizer, ALPHABET_IDS)) == ["DEF", "G"]
    assert detokenizer.stop_string == "FG"


def test_a_stop_string_within_min_tokens_does_not_count(decoder: TokenDecoder) -> None:
    ids = ALPHABET_IDS[:2] * 3  # DEF GH DEF GH DEF GH
    for min_tokens, text, tokens in [(0, "DE", 2), (1, "DE", 2), (2, "DEFGHDE", 4), (4, "DEFGHDEFGHDE", 6)]:
        detokenizer = Detokenizer(decoder, SamplingParams(stop="FG", min_tokens=min_tokens))
        assert ("".join(streamed(detokenizer, ids)), detokenizer.num_tokens) == (text, tokens)
    never = Detokenizer(decoder, SamplingParams(stop="FG", min_tokens=6))
    assert "".join(streamed(never, ids)) == "DEFGHDEFGHDEFGH"
    assert never.stop_string is None


def test_the_stop_string_that_ends_first_wins_whatever_the_order(decoder: TokenDecoder) -> None:
    for stops in (["GHI", "FG", "E"], ["E", "FG", "GHI"]):
        detokenizer = Detokenizer(decoder, SamplingParams(stop=stops))
        detokenizer.push(ALPHABET_IDS, finished=True)
        assert (detokenizer.text, detokenizer.stop_string) == ("D", "E")


def test_a_stop_id_stays_out_of_the_text_unless_it_is_asked_for(decoder: TokenDecoder) -> None:
    for include, text in [(False, "DEFGH"), (True, "DEFGHI")]:
        params = SamplingParams(stop_token_ids=[57], include_stop_str_in_output=include)
        detokenizer = Detokenizer(decoder, params)
        detokenizer.push(ALPHABET_IDS[:3], finished=True, ended_by_stop_id=True)
        assert (detokenizer.text, detokenizer.num_tokens) == (text, 3)


def test_special_tokens_are_skipped_or_shown(decoder: TokenDecoder) -> None:
    for skip, text in [(True, "IJ"), (False, "I<|im_end|>J")]:
        detokenizer = Detokenizer(decoder, SamplingParams(skip_special_tokens=skip))
        detokenizer.push([57, END, 58], finished=True)
        assert detokenizer.text == text


def test_what_comes_after_the_end_changes_nothing(decoder: TokenDecoder) -> None:
    detokenizer = Detokenizer(decoder, SamplingParams(stop="FG"))
    assert detokenizer.push(ALPHABET_IDS) == "FG"
    assert detokenizer.push(ALPHABET_IDS, finished=True) == "FG"
    assert (detokenizer.text, detokenizer.num_tokens) == ("DE", 2)


def test_without_detokenize_only_tokens_are_counted(decoder: TokenDecoder) -> None:
    detokenizer = Detokenizer(decoder, SamplingParams(detokenize=False))
    detokenizer.push(ALPHABET_IDS, finished=True)
    assert (detokenizer.text, detokenizer.num_tokens, detokenizer.finished) == ("", 8, True)


def test_no_tokens_are_no_text(decoder: TokenDecoder) -> None:
    detokenizer = Detokenizer(decoder, SamplingParams(stop="x"))
    detokenizer.push([], finished=True)
    assert (detokenizer.text, detokenizer.num_tokens, detokenizer.finished) == ("", 0, True)


WRITTEN = st.text(
    st.one_of(
        st.sampled_from("ab \n🌟😊👩🏽‍🚀語한é\ufffd"),
        st.characters(codec="utf-8"),
    ),
    max_size=30,
)


@settings(max_examples=200)
@given(written=WRITTEN, data=st.data())
def test_streamed_text_is_the_whole_text_cut_at_the_first_stop(
    tokenizer: PreTrainedTokenizerBase, decoder: TokenDecoder, written: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(written, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)), label="the answer ends after")
    ids = ids[:cut]
    whole = whole_text(tokenizer, ids)
    inside = st.integers(0, max(len(whole) - 1, 0)).flatmap(
        lambda at: st.integers(1, 6).map(lambda length: whole[at : at + length] or "x")
    )
    stops = data.draw(st.lists(inside | st.text("ab ", min_size=1, max_size=3), max_size=3), label="stops")
    include = data.draw(st.booleans(), label="include_stop_str_in_output")
    chunk = data.draw(st.integers(1, 5), label="tokens a push")

    detokenizer = Detokenizer(decoder, SamplingParams(stop=stops, include_stop_str_in_output=include))
    pieces = list(streamed(detokenizer, ids, chunk))

    found = first_stop(whole, stops)
    if found is None:
        assert ("".join(pieces), detokenizer.stop_string) == (whole, None)
        assert detokenizer.num_tokens == len(ids)
    else:
        end, stop = found
        assert "".join(pieces) == whole[: end if include else end - len(stop)]
        assert detokenizer.stop_string == stop
        assert stop in whole_text(tokenizer, ids[: detokenizer.num_tokens])


@settings(max_examples=200)
@given(data=st.data())
def test_any_token_ids_stream_to_what_they_decode_to(
    tokenizer: PreTrainedTokenizerBase, decoder: TokenDecoder, data: st.DataObject
) -> None:
    single_bytes = st.integers(17, 272)  # the byte alphabet: most of them are no character alone
    any_id = st.integers(0, len(tokenizer) - 1)
    ids = data.draw(st.lists(single_bytes | any_id | st.sampled_from(STARS_IDS), max_size=60))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(decoder, SamplingParams(skip_special_tokens=skip))
    assert "".join(streamed(detokenizer, ids)) == whole_text(tokenizer, ids, skip)


@settings(max_examples=100)
@given(st.text(st.sampled_from("a !é🌟語"), max_size=12), st.booleans())
def test_byte_fallback_and_dropped_first_spaces_stream_as_they_decode(
    byte_fallback: PreTrainedTokenizerBase, written: str, with_start: bool
) -> None:
    inner = {"a": [262], "!": [265], "é": [263], " ": [261]}
    ids = [1] if with_start else []
    for character in " " + written:
        ids += inner.get(character) or [3 + byte for byte in character.encode()]
    ids += [259, 260]
    stream = TextStream(TokenDecoder(byte_fallback))
    pieces = [stream.push(token_id) for token_id in ids] + [stream.flush()]
    assert "".join(pieces) == whole_text(byte_fallback, ids) == written + " Hello world"


def test_characters_that_were_shown_stay_when_a_byte_run_ends_badly(
    byte_fallback: PreTrainedTokenizerBase,
) -> None:
    stream = TextStream(TokenDecoder(byte_fallback))
    ids = [3 + byte for byte in "🌟".encode() + "🌟".encode()[:2]]
    pieces = [stream.push(token_id) for token_id in ids] + [stream.flush()]
    assert pieces == ["", "", "", "🌟", "", "", "\ufffd\ufffd"]


def seconds_for(decoder: TokenDecoder, ids: list[int]) -> float:
    """The least CPU time, which other programs do not lengthen, of three runs that push ``ids`` one by one."""
    runs = []
    for _ in range(3):
        detokenizer = Detokenizer(decoder, SamplingParams(stop=["never this", "nor that"]))
        started = time.thread_time()
        for token_id in ids:
            detokenizer.push([token_id])
        runs.append(time.thread_time() - started)
    return min(runs)


@pytest.mark.parametrize("ids", [[57], STARS_IDS, [230]], ids=["letters", "emoji", "bytes of no character"])
def test_the_cost_of_a_token_does_not_grow_with_the_answer(decoder: TokenDecoder, ids: list[int]) -> None:
    short, long = seconds_for(decoder, ids * 400), seconds_for(decoder, ids * 4000)
    # Ten times the tokens. A whole decode for each token would take a hundred times as long.
    assert long < 30 * short

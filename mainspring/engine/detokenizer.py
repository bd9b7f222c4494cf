"""Text from token ids as they come: no half characters, no half stop strings, nothing taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mainspring.engine.stop_strings import StopMatcher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mainspring.engine.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"

# A character has at most four bytes, so an undecodable end of more tokens than this is not a character
# that is still coming. Keeps the cost of a token bounded whatever the model says.
_MAX_PENDING = 16


class TokenDecoder:
    """Decodes short runs of token ids as they read in the middle of a text, or at its start.

    Made once for a tokenizer and shared by all requests. What a single token reads as is remembered.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._fast = bool(tokenizer.is_fast)
        self.special_ids = frozenset(
            (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
            if self._fast
            else tokenizer.all_special_ids
        )
        # Some decoders drop a space at the start of a text. With a token before it, a run is not at the
        # start.
        self._anchor: list[int] = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        self._anchor_length = len(self._decode(self._anchor))
        self._at_start: dict[int, str] = {}
        self._within: dict[int, str] = {}

    def text(self, token_ids: list[int], at_start: bool) -> str:
        """What ``token_ids`` read as at the start of a text, or anywhere else in it."""
        if len(token_ids) > 1:
            return self._read(token_ids, at_start)
        known = self._at_start if at_start else self._within
        piece = known.get(token_ids[0])
        if piece is None:
            piece = known[token_ids[0]] = self._read(token_ids, at_start)
        return piece

    def _read(self, token_ids: list[int], at_start: bool) -> str:
        if at_start:
            return self._decode(token_ids)
        return self._decode(self._anchor + token_ids)[self._anchor_length :]

    def _decode(self, token_ids: list[int]) -> str:
        # Spaces are never "cleaned up": that changes text that was shown already.
        if self._fast:
            return str(self._tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class TextStream:
    """Turns token ids, one at a time, into pieces of text that join to the decoded whole.

    A piece never ends inside a character: tokens that hold the beginning of one are kept back until it is
    complete, or until it is clear that it never will be. Decoding looks at the tokens kept back and the new
    one, never at the whole, so its cost is linear in the number of tokens.

    The pieces join to what the tokenizer makes of all ids at once. The one exception: in a run of byte tokens
    that is not valid UTF-8, a tokenizer with byte fallback gives up the whole run; here the characters that
    were complete, and shown, stay.
    """

    def __init__(self, decoder: TokenDecoder, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skipped = decoder.special_ids if skip_special_tokens else frozenset()
        self._pending: list[int] = []
        self._at_start = True

    def push(self, token_id: int) -> str:
        """Take in the next token; the text that is certain by now and was not before (may be empty)."""
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        piece = self._decoder.text(self._pending, self._at_start)
        if not piece.endswith(REPLACEMENT):
            return self._settle(piece, len(self._pending))
        if len(self._pending) > _MAX_PENDING:
            return self._settle_most(piece)
        return ""

    def flush(self) -> str:
        """End the text; what was kept back, with U+FFFD for what is no character."""
        if not self._pending:
            return ""
        return self._settle(self._decoder.text(self._pending, self._at_start), len(self._pending))

    def _settle(self, piece: str, count: int) -> str:
        del self._pending[:count]
        self._at_start = False
        return piece

    def _settle_most(self, piece: str) -> str:
        """Let go of all pending tokens but the last few, cut where no character can reach across."""
        for count in range(len(self._pending) - 1, 0, -1):
            head = self._decoder.text(self._pending[:count], self._at_start)
            if head + self._decoder.text(self._pending[count:], False) == piece:
                return self._settle(head, count)
        return self._settle(piece, len(self._pending))


class Detokenizer:
    """The text of one answer, as far as it may be shown, and the search for its stop strings.

    ``text`` only ever grows. It lacks what is not decided yet: the beginning of a character, and the
    beginning of what may become a stop string (unless ``include_stop_str_in_output``, where it is shown
    either way). Once the answer is finished it lacks nothing.

    ``tokenizer`` may be a ``TokenDecoder`` made of it before, which saves making one for each answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | TokenDecoder, params: SamplingParams) -> None:
        decoder = tokenizer if isinstance(tokenizer, TokenDecoder) else TokenDecoder(tokenizer)
        self._stream = TextStream(decoder, params.skip_special_tokens) if params.detokenize else None
        self._matcher = StopMatcher(params.stop_strings)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._pieces: list[str] = []
        self._length = 0
        self._taken = 0
        self._finished = False
        self.num_tokens = 0
        """How many tokens belong to the answer: those pushed, up to the one that completed a stop string."""
        self.stop_string: str | None = None
        """The stop string that ended the answer, or None."""

    @property
    def text(self) -> str:
        """The text so far that may be shown."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        whole = self._pieces[0] if self._pieces else ""
        held = 0 if self._finished or self._include_stop else self._matcher.held
        return whole[: len(whole) - held] if held else whole

    def take(self) -> str:
        """The text that may be shown by now and that ``take`` has not returned before.

        Costs what is new, where ``text`` costs what is there.
        """
        total = self._length if self.stop_string is None else sum(map(len, self._pieces))
        held = 0 if self._finished or self._include_stop else self._matcher.held
        start, tail = total, list[str]()
        for piece in reversed(self._pieces):
            if start <= self._taken:
                break
            start -= len(piece)
            tail.append(piece)
        new = "".join(reversed(tail))[max(self._taken - start, 0) :]
        new = new[: len(new) - held] if held else new
        self._taken += len(new)
        return new

    @property
    def finished(self) -> bool:
        """Whether the answer has ended, by ``finished`` or by a stop string."""
        return self._finished

    def push(self, token_ids: Sequence[int], finished: bool = False, *, ended_by_stop_id: bool = False) -> str | None:
        """Take in the next tokens of the answer, in order.

        ``finished`` says that they are its last. ``ended_by_stop_id`` says that the last of them is a stop
        id or end of sequence: its own text is left out, unless ``include_stop_str_in_output``.

        Returns the stop string, where one is complete; the answer is then finished, and ``num_tokens`` says
        how many of the tokens belong to it. One that is complete within the first ``min_tokens`` tokens
        does not count. Tokens pushed after the end change nothing.
        """
        if self._finished:
            return self.stop_string
        hidden = len(token_ids) - 1 if ended_by_stop_id and not self._include_stop else len(token_ids)
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if self._stream is not None and index != hidden and self._extend(self._stream.push(token_id)):
                return self.stop_string
        if finished:
            if self._stream is not None and self._extend(self._stream.flush()):
                return self.stop_string
            self._finished = True
        return None

    def _extend(self, piece: str) -> bool:
        """Add a piece; True where it completes a stop string, and the text is cut there."""
        if not piece:
            return False
        self._pieces.append(piece)
        match = self._matcher.feed(piece, counts=self.num_tokens > self._min_tokens)
        if match is None:
            self._length += len(piece)
            return False
        end = self._length + match.end
        self._pieces = ["".join(self._pieces)[: end if self._include_stop else end - len(match.stop)]]
        self.stop_string = match.stop
        self._finished = True
        return True

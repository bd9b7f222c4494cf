"""What seats hold for penalties, biases, masks and log-probabilities, and what the step does with it.

Each kind has fixed buffers with a row per seat, allocated when the first request asks for that kind; the full variant
of the step is then recorded again, with that kind's operations. An engine that is never asked pays nothing. Bytes, with
``V`` ids in the vocabulary and ``S`` seats (the null seat included; in brackets for 257 x 151,936):

    penalties     4 S V                  an int32 an id: twice its count in the answer, + 1 if in the prompt (149 MiB)
    logit_bias    8 S BIAS_WIDTH         (0.6 MiB)
    allowed ids   S V / 8                one bit an id (4.7 MiB); also what a grammar allows next
    bad words     4 S BAD_WORDS_WIDTH BAD_WORD_TOKENS  (0.5 MiB)
    logprobs      8 rows (2 + max_logprobs)  (a step's record, wider; 44 KiB for 256 rows and 20)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from mainspring.engine.asks import Asks
from mainspring.engine.request import Request
from mainspring.engine.seats import SeatTable, Upload
from mainspring.engine.structured import grammar_masks
from mainspring.graphs import FixedBuffers
from mainspring.kernels import sampling
from mainspring.kernels.sampling_extras import (
    add_logit_bias,
    apply_penalties,
    bad_word_endings,
    mask_not_allowed,
    token_logprobs,
)

#: Entries of one request's ``logit_bias``.
BIAS_WIDTH = 300
#: Token sequences that one request's ``bad_words`` may come to (a word has up to two spellings), and their length.
BAD_WORDS_WIDTH = 64
BAD_WORD_TOKENS = 8

#: Name -> (shape, dtype, fill) of buffers.
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype, int]]


class LogitsState:
    """The buffers allocated so far, how a seat's rows are written, and the operations on them.

    Args:
        table: the seats.
        buffers: where the buffers are allocated, as ``"logits_state.{name}"``.
        vocab_size: ids in the vocabulary.
        max_rows: rows of the largest step.
        max_logprobs: the most likely tokens that are kept for each token.
    """

    def __init__(
        self,
        table: SeatTable,
        buffers: FixedBuffers,
        vocab_size: int,
        max_rows: int,
        max_logprobs: int,
    ) -> None:
        self.table = table
        self.vocab_size = vocab_size
        self.max_logprobs = max_logprobs
        self.active = Asks.NOTHING
        self._buffers = buffers
        self._tensors: dict[str, torch.Tensor] = {}
        rows = table.num_seats + 1
        self._layouts: dict[Asks, Layout] = {
            Asks.PENALTIES: {"seen": ((rows, vocab_size), torch.int32, 0)},
            Asks.LOGIT_BIAS: {
                "bias_ids": ((rows, BIAS_WIDTH), torch.int32, -1),
                "bias_values": ((rows, BIAS_WIDTH), torch.float32, 0),
            },
            Asks.ALLOWED_IDS: {"allowed": ((rows, -(-vocab_size // 32)), torch.int32, 0)},
            Asks.BAD_WORDS: {
                "bad_words": ((rows, BAD_WORDS_WIDTH, BAD_WORD_TOKENS), torch.int32, -1),
                "recent": ((rows, BAD_WORD_TOKENS - 1), torch.int32, -2),
            },
            Asks.LOGPROBS: {"record": ((max_rows, 2 * max_logprobs + 4), torch.int32, 0)},
            Asks.PROCESSORS: {},
            Asks.GRAMMAR: {},
        }
        self._writers: dict[Asks, Callable[[Sequence[tuple[int, Request]], Upload], None]] = {
            Asks.PENALTIES: self._write_seen,
            Asks.LOGIT_BIAS: self._write_bias,
            Asks.ALLOWED_IDS: self._write_allowed,
            Asks.BAD_WORDS: self._write_bad_words,
        }

    # -- memory --------------------------------------------------------------------------------------------

    def missing(self, asks: Asks) -> Asks:
        """The kinds in ``asks`` that have no buffers yet."""
        return asks & ~self.active

    def nbytes(self, asks: Asks) -> int:
        """Bytes that the buffers of these kinds take."""
        layouts = [layout for kind, layout in self._layouts.items() if kind & asks]
        return sum(int(np.prod(shape)) * 4 for layout in layouts for shape, _, _ in layout.values())

    def allocate(self, asks: Asks) -> None:
        """Allocate the buffers of these kinds. The full variant must not be recorded, or must be recorded again.

        Raises ``RuntimeError`` (on a GPU ``OutOfMemoryError``) where memory does not suffice; nothing is kept then.
        """
        made: dict[str, torch.Tensor] = {}
        try:
            for kind, layout in self._layouts.items():
                if kind & self.missing(asks):
                    for name, (shape, dtype, fill) in layout.items():
                        made[name] = self._buffers.allocate(f"logits_state.{name}", shape, dtype, fill)
        except RuntimeError:
            for name in made:
                self._buffers.remove(f"logits_state.{name}")
            raise
        self._tensors |= made
        self.active |= asks

    # -- admission -----------------------------------------------------------------------------------------

    def write(self, admitted: Sequence[tuple[int, Request]], upload: Upload) -> None:
        """Put the state of requests that are about to sample (first or again, after a preemption) into their seats."""
        for kind, writer in self._writers.items():
            asking = [(seat, request) for seat, request in admitted if request.asks & kind]
            if asking:
                writer(asking, upload)

    def _write_seen(self, admitted: Sequence[tuple[int, Request]], upload: Upload) -> None:
        seen = self._tensors["seen"]
        seen.index_fill_(0, upload(np.array([seat for seat, _ in admitted], dtype=np.int64)), 0)
        for seat, request in admitted:
            in_prompt = np.unique(np.asarray(request.prompt_token_ids, dtype=np.int64))
            written, counts = np.unique(np.asarray(request.output_token_ids, dtype=np.int64), return_counts=True)
            ids = np.union1d(in_prompt, written)
            values = np.isin(ids, in_prompt).astype(np.int32)
            values[np.searchsorted(ids, written)] += (2 * counts).astype(np.int32)
            seen[seat].index_copy_(0, upload(ids), upload(values))

    def _write_bias(self, admitted: Sequence[tuple[int, Request]], upload: Upload) -> None:
        ids = np.full((len(admitted), BIAS_WIDTH), -1, dtype=np.int32)
        values = np.zeros((len(admitted), BIAS_WIDTH), dtype=np.float32)
        for row, (_, request) in enumerate(admitted):
            bias = request.params.logit_bias or {}
            ids[row, : len(bias)] = list(bias.keys())
            values[row, : len(bias)] = list(bias.values())
        self._write_rows(admitted, {"bias_ids": ids, "bias_values": values}, upload)

    def write_grammars(self, rows: Sequence[tuple[int, Request]], upload: Upload) -> None:
        """Write what the grammars of these requests allow next; each has been followed to the newest token."""
        grammars = [request.grammar for _, request in rows if request.grammar is not None]
        self._write_rows(rows, {"allowed": grammar_masks(grammars, self.vocab_size)}, upload)

    def _write_allowed(self, admitted: Sequence[tuple[int, Request]], upload: Upload) -> None:
        admitted = [(seat, request) for seat, request in admitted if request.grammar is None]
        if not admitted:
            return
        width = self._tensors["allowed"].shape[1]
        bits = np.zeros((len(admitted), width * 32), dtype=np.uint8)
        for row, (_, request) in enumerate(admitted):
            bits[row, list(request.params.allowed_token_ids or ())] = 1
        self._write_rows(admitted, {"allowed": np.packbits(bits, axis=1, bitorder="little").view("<i4")}, upload)

    def _write_bad_words(self, admitted: Sequence[tuple[int, Request]], upload: Upload) -> None:
        words = np.full((len(admitted), BAD_WORDS_WIDTH, BAD_WORD_TOKENS), -1, dtype=np.int32)
        recent = np.full((len(admitted), BAD_WORD_TOKENS - 1), -2, dtype=np.int32)
        for row, (_, request) in enumerate(admitted):
            for index, word in enumerate(request.bad_word_ids):
                words[row, index, BAD_WORD_TOKENS - len(word) :] = word
            last = request.output_token_ids[-recent.shape[1] :]
            recent[row, recent.shape[1] - len(last) :] = last
        self._write_rows(admitted, {"bad_words": words, "recent": recent}, upload)

    def _write_rows(
        self, admitted: Sequence[tuple[int, Request]], rows: Mapping[str, np.ndarray], upload: Upload
    ) -> None:
        seats = upload(np.array([seat for seat, _ in admitted], dtype=np.int64))
        for name, values in rows.items():
            self._tensors[name].index_copy_(0, seats, upload(values))

    # -- in the step ---------------------------------------------------------------------------------------

    def asking(self, kind: Asks, seats: torch.Tensor) -> torch.Tensor:
        """``[b]`` bool: which of these seats ask for ``kind``."""
        return (self.table.asks[seats] & int(kind)) != 0

    def adjust(self, logits: torch.Tensor, seats: torch.Tensor) -> None:
        """Apply biases, penalties and masks, in this order (vLLM's), to fp32 ``logits`` ``[b, vocab]`` in place."""
        tensors = self._tensors
        if self.active & Asks.LOGIT_BIAS:
            asking = self.asking(Asks.LOGIT_BIAS, seats).unsqueeze(1)
            add_logit_bias(logits, torch.where(asking, tensors["bias_ids"][seats], -1), tensors["bias_values"][seats])
        if self.active & Asks.PENALTIES:
            self._penalize(logits, seats)
        if self.active & Asks.ALLOWED_IDS:
            places = torch.arange(32, dtype=torch.int32, device=logits.device)
            bits = (tensors["allowed"][seats].unsqueeze(2) >> places) & 1
            allowed = bits.flatten(1)[:, : self.vocab_size] != 0
            mask_not_allowed(logits, allowed, self.asking(Asks.ALLOWED_IDS, seats))
        if self.active & Asks.BAD_WORDS:
            endings = bad_word_endings(tensors["bad_words"][seats], tensors["recent"][seats])
            sampling.mask_stop_ids(logits, endings, self.asking(Asks.BAD_WORDS, seats))

    def _penalize(self, logits: torch.Tensor, seats: torch.Tensor) -> None:
        table, asking = self.table, self.asking(Asks.PENALTIES, seats)
        seen = self._tensors["seen"][seats]
        apply_penalties(
            logits,
            seen >> 1,
            (seen & 1) != 0,
            torch.where(asking, table.repetition_penalty[seats], 1.0),
            torch.where(asking, table.presence_penalty[seats], 0.0),
            torch.where(asking, table.frequency_penalty[seats], 0.0),
        )

    @property
    def record(self) -> torch.Tensor | None:
        """``[max rows, 4 + 2 max_logprobs]`` int32: a step's record with log-probabilities; None before the first
        request for any."""
        return self._tensors.get("record")

    def note(self, logits: torch.Tensor, seats: torch.Tensor, tokens: torch.Tensor, runs: torch.Tensor) -> None:
        """Take over the chosen ``tokens`` ``[b]`` of the rows that run, and their log-probabilities.

        ``logits`` ``[b, vocab]`` are the model's own.
        """
        tensors = self._tensors
        if self.active & Asks.PENALTIES:
            counted = runs & self.asking(Asks.PENALTIES, seats)
            tensors["seen"].view(-1).index_add_(0, seats * self.vocab_size + tokens, 2 * counted.to(torch.int32))
        if self.active & Asks.BAD_WORDS:
            before = tensors["recent"][seats]
            after = torch.cat((before[:, 1:], tokens.to(torch.int32).unsqueeze(1)), dim=1)
            tensors["recent"].index_copy_(0, seats, torch.where(runs.unsqueeze(1), after, before))
        if self.active & Asks.LOGPROBS:
            packed = pack_logprobs(logits, tokens, self.max_logprobs)
            tensors["record"][: packed.shape[0], 2:].copy_(packed)


def pack_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
    """``[b, 2 + 2 k]`` int32: each token's log-probability, its rank, the top ids, the top values (floats as bits)."""
    told = token_logprobs(logits, tokens, k)
    return torch.cat(
        (
            told.chosen.view(torch.int32).unsqueeze(1),
            told.rank.to(torch.int32).unsqueeze(1),
            told.top_ids.to(torch.int32),
            told.top_values.view(torch.int32),
        ),
        dim=1,
    )

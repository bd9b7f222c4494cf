"""How the tokens of an answer are chosen, and when it ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mainspring.engine.given_numbers import real_number, whole_number
from mainspring.engine.options import reject_unknown
from mainspring.engine.structured import StructuredOutputsParams

LogitsProcessor = Callable[..., Any]

_SEED_LIMIT = 1 << 63
_INT32_MAX = (1 << 31) - 1
_FLOAT32_MAX = 3.4e38  # the device keeps these as fp32


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of an answer are chosen, and when it ends.

    Names and defaults are vLLM's. Everything is checked once, here, as far as it can be without knowing the
    model; what is given as a list is kept as a tuple, so that nothing changes afterwards.

    Choosing a token:
        temperature: the logits are divided by it; 0 takes the most likely token, always.
        top_k: only the ``top_k`` most likely tokens; 0 or -1 is all of them.
        top_p: of those, the fewest that together reach this probability, in (0, 1].
        min_p: only tokens at least this fraction as likely as the likeliest, in [0, 1].
        seed: same seed, same prompt, same answer, whatever else runs beside it. None draws one.
        presence_penalty, frequency_penalty: taken off the logit of a token of the answer, once or for
            each time that it stands there; in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of the tokens of prompt and
            answer; greater than 0, and 1 changes nothing.
        logit_bias: token id to a number in [-100, 100] that is added to its logit.
        allowed_token_ids: no other token is chosen.
        bad_words: texts whose last token is not chosen where it would complete them.
        structured_outputs: what the answer has to look like, a ``StructuredOutputsParams`` or a mapping of its fields.
            The CPU writes such a row's mask before every step.
        logits_processors: Python functions ``(token_ids, logits) -> logits`` that see and change the logits of
            every step, before all of the above. They keep the CPU in every step.

        Bias, penalties and masks apply in this order: ``logit_bias``, the penalties, ``allowed_token_ids``,
        ``bad_words``, ``min_tokens``. So a bias never ends an answer before ``min_tokens``.

    Ending the answer:
        max_tokens: at most so many tokens; None goes on to the end of the context.
        min_tokens: no end of sequence, stop id or stop string before this many tokens.
        stop: a text, or several, at which the answer ends. It is cut off, unless
            ``include_stop_str_in_output``.
        stop_token_ids: token ids that end the answer besides the model's own.
        ignore_eos: the model's own end-of-sequence tokens do not end the answer.

    What comes back:
        n: how many answers.
        logprobs, prompt_logprobs: how many of the most likely tokens are told for each token of the
            answer, or of the prompt; 0 tells only the token itself, -1 all, None nothing. They are those of
            the model itself, before temperature, bias, penalties and masks. The engine's ``max_logprobs``
            (20) is the most that may be asked for.
        detokenize: False gives token ids only.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        UnknownOptionError: (a TypeError) a name that does not exist; the nearest one is suggested.
        TypeError: a value of the wrong type.
        ValueError: a value out of its range, or two that contradict each other.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __new__(cls, *_args: Any, **named: Any) -> SamplingParams:
        """Refuse unknown names, with a suggestion, before the generated ``__init__`` sees them."""
        reject_unknown(named, {each.name for each in fields(cls)}, cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._keep_integer("n", low=1)
        self._keep_number("temperature", low=0.0, high=_FLOAT32_MAX)
        self._keep_number("top_p", low=0.0, high=1.0, low_excluded=True)
        self._keep_integer("top_k", low=-1, high=_INT32_MAX, hint="0 and -1 turn it off")
        self._keep_number("min_p", low=0.0, high=1.0)
        self._keep_number("presence_penalty", low=-2.0, high=2.0)
        self._keep_number("frequency_penalty", low=-2.0, high=2.0)
        self._keep_number("repetition_penalty", low=0.0, high=_FLOAT32_MAX, low_excluded=True)
        if self.seed is not None:
            self._keep_integer("seed", low=-_SEED_LIMIT, high=_SEED_LIMIT - 1)
        if self.max_tokens is not None:
            self._keep_integer("max_tokens", low=1, hint="None goes on to the end of the context")
        self._keep_integer("min_tokens", low=0, high=_INT32_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._keep_integer(name, low=-1, hint="-1 is the whole vocabulary, None turns it off")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} is {value!r}; it is True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._keep("stop", _texts("stop", stop))
        self._keep("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.bad_words is not None:
            self._keep("bad_words", _texts("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            self._keep("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty, so no token could be chosen; None allows all")
        if self.logit_bias is not None:
            self._keep("logit_bias", _bias(self.logit_bias))
        if self.logits_processors is not None:
            self._keep("logits_processors", _functions(self.logits_processors))
        if self.structured_outputs is not None:
            self._keep("structured_outputs", _structure(self.structured_outputs))
        self._check_together()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, always."""
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, as a tuple that may be empty."""
        return tuple(self.stop or ())

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} > max_tokens {self.max_tokens}; raise max_tokens")
        if self.stop and not self.detokenize:
            raise ValueError("stop needs text to look in, and detokenize is False; use stop_token_ids instead")
        if self.structured_outputs is not None:
            for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} {getattr(self, name)!r} may rule out every token that structured_outputs allows; "
                        f"leave one of them out"
                    )
        if self.n > 1 and self.greedy:
            raise ValueError(f"n is {self.n} at temperature 0, where all answers are the same; raise temperature")

    def _keep_integer(self, name: str, **limits: Any) -> None:
        self._keep(name, _integer(name, getattr(self, name), **limits))

    def _keep_number(self, name: str, **limits: Any) -> None:
        self._keep(name, _number(name, getattr(self, name), **limits))

    def _keep(self, name: str, value: object) -> None:
        """Store a field in its checked form, while the object is being made."""
        object.__setattr__(self, name, value)


def _integer(name: str, value: Any, *, low: int, high: int | None = None, hint: str = "") -> int:
    wanted = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    wanted += f" ({hint})" if hint else ""
    try:
        number = whole_number(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it is {wanted}") from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} is {value}; it is {wanted}")
    return number


def _number(name: str, value: Any, *, low: float, high: float, low_excluded: bool = False) -> float:
    wanted = f"a number in {'(' if low_excluded else '['}{low:g}, {high:g}]"
    try:
        number = real_number(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it is {wanted}") from None
    except OverflowError:
        raise ValueError(f"{name} is {value}; it is {wanted}") from None
    above = number > low if low_excluded else number >= low
    if not (above and number <= high):
        raise ValueError(f"{name} is {value}; it is {wanted}")
    return number


def _tuple(name: str, values: Iterable[Any] | None, of: str) -> tuple[Any, ...]:
    try:
        return () if values is None else tuple(values)
    except TypeError:
        raise TypeError(f"{name} is {values!r}; it is a list of {of}") from None


def _texts(name: str, values: Iterable[Any] | None) -> tuple[str, ...]:
    if isinstance(values, str):
        raise TypeError(f"{name} is the text {values!r}; it is a list of texts")
    texts = _tuple(name, values, "texts")
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} holds {text!r}; it holds texts")
        if not text:
            raise ValueError(f"{name} holds an empty text, which is everywhere; leave it out")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{name} holds {text!r}, in which half of a surrogate pair is no text; decode it as UTF-8")
    return texts


def _token_ids(name: str, values: Iterable[Any] | None) -> tuple[int, ...]:
    if isinstance(values, (bytes, bytearray)):
        raise TypeError(f"{name} is {values!r}; it is a list of token ids")
    ids = _tuple(name, values, "token ids")
    if all(type(token_id) is int for token_id in ids) and 0 <= min(ids, default=0) <= max(ids, default=0) <= _INT32_MAX:
        return ids
    return tuple(_integer(f"a token id in {name}", token_id, low=0, high=_INT32_MAX) for token_id in ids)


def _bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias is {bias!r}; it maps token ids to numbers")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # JSON has no integer keys, so a request that came as JSON has "42".
        token_id = int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,10}", key) else key
        token_id = _integer("a token id in logit_bias", token_id, low=0, high=_INT32_MAX)
        if token_id in checked:
            raise ValueError(f"logit_bias names token id {token_id} twice; give it once")
        checked[token_id] = _number(f"logit_bias[{key}]", value, low=-100.0, high=100.0)
    return checked


def _structure(value: Any) -> StructuredOutputsParams:
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"structured_outputs is {value!r}; it is a StructuredOutputsParams")
    return StructuredOutputsParams(**value)


def _functions(values: Iterable[Any]) -> tuple[LogitsProcessor, ...]:
    functions = _tuple("logits_processors", values, "functions")
    for function in functions:
        if not callable(function):
            raise TypeError(f"logits_processors holds {function!r}; it holds functions")
    return functions

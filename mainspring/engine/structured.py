"""Structured outputs: answers that keep to a JSON schema, a regular expression, a choice or a grammar.

The grammar says, after every token, which tokens may come next: a bit for each id of the vocabulary. Those bits lie in
the fixed buffer that ``allowed_token_ids`` uses, so that choosing the token stays in the recorded step; only the bits
of such rows are written anew before each step, and nothing is launched ahead meanwhile. Grammars are compiled and
followed by llguidance.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from mainspring.engine.errors import RequestError
from mainspring.engine.options import reject_unknown

#: Compiled grammars that are kept for requests to come.
CACHED_GRAMMARS = 256
#: Characters that a grammar may have as it was given.
MAX_GRAMMAR_LENGTH = 1 << 20

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What an answer has to look like; exactly one of the first five. Names are vLLM's.

    Args:
        json: a JSON schema, as a mapping or as text. What the schema asks for and cannot be kept to is an error.
        regex: a regular expression that the whole answer matches; without look-around and back-references.
        choice: texts, of which the answer is one.
        grammar: a grammar in Lark's notation, as llguidance takes it; it begins at ``start``.
        json_object: any JSON object.
        whitespace_pattern: for JSON: a regular expression for the white space between its parts. None is that of one
            line: a space after each comma and colon, none elsewhere.

    Raises:
        TypeError: an unknown name, or a value of the wrong type.
        ValueError: none or several of the five, or an empty one.
    """

    json: str | Mapping[str, Any] | None = field(default=None)
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None

    def __new__(cls, *_args: Any, **named: Any) -> StructuredOutputsParams:
        """Refuse unknown names, with a suggestion, before the generated ``__init__`` sees them."""
        reject_unknown(named, {each.name for each in fields(cls)}, cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of {', '.join(_KINDS)}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise TypeError(f"structured_outputs.{name} is {value!r}; it is a text that is not empty")
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise TypeError(f"structured_outputs.json_object is {self.json_object!r}; it is True or False")
        if self.whitespace_pattern is not None and not (self.json or self.json_object):
            raise ValueError("structured_outputs.whitespace_pattern is for json and json_object only")
        if self.choice is not None:
            choice = (self.choice,) if isinstance(self.choice, str) else tuple(self.choice)
            if not choice or not all(isinstance(each, str) and each for each in choice):
                raise ValueError(f"structured_outputs.choice is {self.choice!r}; it is a list of texts, none empty")
            object.__setattr__(self, "choice", choice)


def _schema_text(schema: Any) -> str:
    """A JSON schema as text, checked to be a JSON object."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, allow_nan=False)
    except RecursionError:
        raise ValueError("the JSON schema is nested too deeply; flatten it") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"structured_outputs.json is not JSON: {error}") from error
    if not isinstance(parsed, Mapping):
        raise TypeError(f"a JSON schema is an object, not {type(parsed).__name__}")
    return text


class Grammar:
    """One answer's way through a grammar. Follows the answer's tokens and tells what may come next."""

    def __init__(self, matcher: Any, executor: Any) -> None:
        self._matcher = matcher
        self.executor = executor
        self._consumed = 0

    def copy(self) -> Grammar:
        """Another answer's way through the same grammar, from its start."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return Grammar(matcher, self.executor)

    @property
    def matcher(self) -> Any:
        """llguidance's matcher."""
        return self._matcher

    def follow(self, token_ids: Sequence[int]) -> None:
        """Go on to the end of ``token_ids``, the answer's tokens so far.

        Raises ``RequestError`` where the grammar cannot be followed any further.
        """
        new = list(token_ids[self._consumed :])
        self._consumed = len(token_ids)
        if (new and not self._matcher.consume_tokens(new)) or self._matcher.is_error():
            raise RequestError(f"the grammar cannot be followed any further: {self._matcher.get_error()}")


def grammar_masks(grammars: Sequence[Grammar], vocab_size: int) -> np.ndarray:
    """``[len(grammars), ceil(vocab_size / 32)]`` int32: a bit for each token that may come next, lowest bit first."""
    from llguidance import numpy as bitmask

    masks: np.ndarray = np.zeros((len(grammars), -(-vocab_size // 32)), dtype=np.int32)
    if len(grammars) == 1:
        bitmask.fill_next_token_bitmask(grammars[0].matcher, masks, 0)
    else:
        rows = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]
        bitmask.fill_next_token_bitmask_par(grammars[0].executor, rows, masks)
    return masks


class GrammarCompiler:
    """Compiles grammars for one model, and keeps them. May be used from several threads.

    Args:
        tokenizer: the model's tokenizer, or None.
        vocab_size: ids in the model's vocabulary.
        eos_token_ids: ids that end an answer; they are allowed where the grammar is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._executor: Any = None
        self._compiled: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A grammar at its start. Raises ``RequestError`` where there is none for ``params``."""
        with self._lock:
            known = self._compiled.get(params)
            if known is not None:
                self._compiled.move_to_end(params)
                return known.copy()
            self._prepare()
        grammar = self._compile(params)
        with self._lock:
            self._compiled[params] = grammar
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return grammar.copy()

    def _prepare(self) -> None:
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, and this engine has none (skip_tokenizer_init)")
        if not getattr(self._tokenizer, "is_fast", False):
            raise RequestError("structured_outputs needs a fast tokenizer, and this model's is none")
        if not self._eos_token_ids:
            raise RequestError("structured_outputs needs a model with an end-of-sequence id, and this one has none")
        if importlib.util.find_spec("llguidance") is None:
            raise RequestError("structured_outputs needs llguidance: pip install 'mainspring[server]'")
        if self._vocabulary is None:
            from llguidance import LLExecutor, hf

            self._vocabulary = hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
            self._executor = LLExecutor()

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        from llguidance import LLMatcher

        try:
            text = self._text(params)
            if len(text) > MAX_GRAMMAR_LENGTH:
                raise RequestError(
                    f"the grammar is {len(text)} characters long > {MAX_GRAMMAR_LENGTH}; give a shorter one"
                )
            wrong, messages = LLMatcher.validate_grammar_with_warnings(text, self._vocabulary)
        except RecursionError:
            raise RequestError("the grammar is nested too deeply; flatten it") from None
        except ValueError as error:
            raise RequestError(f"structured_outputs cannot be kept to: {error}") from error
        if wrong:
            raise RequestError(f"structured_outputs cannot be kept to: {' '.join(messages[0].split())}")
        matcher = LLMatcher(self._vocabulary, text, log_level=0)
        if matcher.is_error():
            raise RequestError(f"structured_outputs cannot be kept to: {matcher.get_error()}")
        return Grammar(matcher, self._executor)

    def _text(self, params: StructuredOutputsParams) -> str:
        from llguidance import LLMatcher

        if params.regex is not None:
            return str(LLMatcher.grammar_from_regex(params.regex))
        if params.grammar is not None:
            return str(LLMatcher.grammar_from_lark(params.grammar))
        if params.choice is not None:
            alternatives = " | ".join(json.dumps(each) for each in params.choice)
            # One terminal: as alternatives of a rule there may be only some two thousand of them.
            return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}"))
        schema = '{"type": "object"}' if params.json is None else str(params.json)
        spaces: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        if params.whitespace_pattern is not None:
            spaces = {"whitespace_pattern": params.whitespace_pattern}
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=spaces))

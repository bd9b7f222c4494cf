"""Unknown option names are errors that suggest the nearest name that exists."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class UnknownOptionError(TypeError):
    """A keyword argument has a name that its receiver does not know."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The name in ``allowed`` that looks most like ``name``, or None where none is near.

    Upper and lower case, and dashes for underscores, count as the same.
    """
    spellings = {_plain(candidate): candidate for candidate in sorted(allowed)}
    close = difflib.get_close_matches(_plain(name), spellings, n=1, cutoff=0.6)
    return spellings[close[0]] if close else None


def reject_unknown(names: Iterable[str], allowed: Collection[str], what: str) -> None:
    """Raise where a name in ``names`` is not in ``allowed``.

    ``what`` says who was given the names, such as ``"SamplingParams"``. All unknown names are told at once,
    each with the nearest one that exists; where one has none near, the names that exist are listed.

    Raises:
        UnknownOptionError: a name is not in ``allowed``.
    """
    unknown = [name for name in names if name not in allowed]
    if not unknown:
        return
    suggestions = {name: nearest(name, allowed) for name in unknown}
    said = [
        f"{name!r} (did you mean {suggestion!r}?)" if suggestion else repr(name)
        for name, suggestion in suggestions.items()
    ]
    message = f"{what} has no option {', '.join(said)}"
    if not all(suggestions.values()):
        message += f"; the options are {', '.join(sorted(allowed))}"
    raise UnknownOptionError(message)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")

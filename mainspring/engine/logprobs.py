"""From packed rows of log-probabilities to the mappings that users get."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mainspring.engine.outputs import Logprob

#: What a token id reads as; None where there is no text.
TokenText = Callable[[int], str | None]


def unpack_logprobs(row: np.ndarray, token: int, k: int, text: TokenText) -> dict[int, Logprob]:
    """Token id -> ``Logprob``: the ``token`` itself first, then the ``k`` most likely (which may include it).

    ``row`` is ``[2 + 2 m]`` int32 as ``pack_logprobs`` makes it, with ``m`` >= ``k``.
    """
    width = (len(row) - 2) // 2
    floats = row.view(np.float32)
    told = {token: Logprob(float(floats[0]), int(row[1]), text(token))}
    for place in range(k):
        token_id = int(row[2 + place])
        if token_id not in told:
            told[token_id] = Logprob(float(floats[2 + width + place]), place + 1, text(token_id))
    return told

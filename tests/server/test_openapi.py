"""Requests made up from the service's own description never find a fault in the server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from live_server import Live

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = 40


def test_nothing_that_fits_the_description_or_does_not_makes_the_server_fail(tiny_chat: Live) -> None:
    schema = schemathesis.openapi.from_url(f"{tiny_chat.url}/openapi.json")
    statuses: dict[str, set[int]] = {}

    def check(case: Any) -> None:
        reply = case.call(timeout=60)
        statuses.setdefault(case.operation.path, set()).add(reply.status_code)
        assert reply.status_code < 500, (reply.text, case.as_curl_command())

    limits = settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for result in schema.get_all_operations():
        operation = result.ok()
        modes = list(schemathesis.GenerationMode) if operation.method.upper() == "POST" else [None]
        for mode in modes:
            strategy = operation.as_strategy() if mode is None else operation.as_strategy(generation_mode=mode)
            limits(given(case=strategy)(check))()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models"} <= set(statuses)
    # Both what is right and what is wrong was among them.
    assert {200, 400} <= statuses["/v1/completions"] | statuses["/v1/chat/completions"]
    tiny_chat.wait_for(lambda: tiny_chat.is_idle)

"""``mainspring generate``: what goes in, what comes out, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import FakeLLM
from typer.testing import Result

Invoke = Callable[..., Result]


def test_an_answer_goes_to_the_standard_output_and_nothing_else(invoke: Invoke) -> None:
    done = invoke("generate", "one two", "--stats")
    assert (done.exit_code, done.stdout) == (0, "one two\n")


def test_text_that_looks_like_markup_is_written_as_it_is(invoke: Invoke) -> None:
    assert invoke("generate", "[red]a[/red] :smile:").stdout == "[red]a[/red] :smile:\n"


def test_an_answer_cut_by_its_length_says_so_beside_it(invoke: Invoke) -> None:
    done = invoke("generate", "one two three")
    assert done.stdout == "one two three\n"
    assert "cut at 3 tokens" in done.stderr
    assert "cut" not in invoke("generate", "one two").stderr


def test_options_reach_the_engine_and_what_is_not_given_does_not(invoke: Invoke, fake: type[FakeLLM]) -> None:
    invoke("generate", "x")
    assert fake.made[-1].options == {"model": "smollm2", "enforce_eager": False}
    invoke(
        *("generate", "x", "--model", "folder", "--dtype", "float32", "--device", "cpu"),
        *("--load-format", "dummy", "--max-model-len", "128", "--max-num-seqs", "3"),
        *("--max-num-batched-tokens", "64", "--gpu-memory-utilization", "0.5", "--kv-cache-memory", "2GiB"),
        *("--block-size", "8", "--no-enable-prefix-caching", "--enforce-eager"),
        *("--cudagraph-capture-sizes", "1,2,4", "--seed", "7"),
    )
    assert fake.made[-1].options == {
        "model": "folder",
        "dtype": "float32",
        "device": "cpu",
        "load_format": "dummy",
        "max_model_len": 128,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory": 2 << 30,
        "block_size": 8,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "cudagraph_capture_sizes": [1, 2, 4],
        "seed": 7,
    }


@pytest.mark.parametrize(("given", "sizes"), [("16,64", [16, 64]), ("off", []), ("", [])])
def test_sizes_of_recorded_prefill_steps_reach_the_engine(
    invoke: Invoke, fake: type[FakeLLM], given: str, sizes: list[int]
) -> None:
    invoke("generate", "x", "--prefill-graph-sizes", given)
    assert fake.made[-1].options["prefill_graph_sizes"] == sizes


def test_sampling_options_reach_the_request(invoke: Invoke, fake: type[FakeLLM]) -> None:
    invoke("generate", "x")
    plain = fake.made[-1].params[-1]
    assert (plain.temperature, plain.max_tokens, plain.seed, plain.n) == (0.0, 256, None, 1)
    invoke(
        *("generate", "x", "--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "40"),
        *("--min-p", "0.1", "--seed", "7", "--stop", "a", "--stop", "b\n", "--ignore-eos"),
    )
    params = fake.made[-1].params[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 40)
    assert (params.min_p, params.seed, params.stop, params.ignore_eos) == (0.1, 7, ("a", "b\n"), True)


def test_what_is_not_given_is_the_models_default(
    invoke: Invoke, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "sampling_defaults", {"temperature": 0.6, "top_k": 20, "max_tokens": 50})
    invoke("generate", "x", "--top-k", "7", "--generation-config", "auto")
    params = fake.made[-1].params[-1]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 7, 50)
    assert fake.made[-1].options["generation_config"] == "auto"
    assert invoke("generate", "x", "-n", "2").exit_code == 0
    monkeypatch.setattr(fake, "sampling_defaults", {})
    assert invoke("generate", "x", "-n", "2").exit_code == 2


def test_prompts_come_from_arguments_files_and_the_standard_input(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from é\nfile\n", encoding="utf-8")
    assert invoke("generate", "--prompt-file", str(file)).stdout == "from é\nfile\n"
    assert invoke("generate", input="from a pipe\n").stdout == "from a pipe\n"
    both = invoke("generate", "one", "--prompt-file", str(file), "--prompt-file", "-", input="in")
    assert both.stdout == "--- prompt 1 ---\none#0\n--- prompt 2 ---\nfrom é\nfile#0\n--- prompt 3 ---\nin#0\n"


def test_several_answers_are_told_apart(invoke: Invoke) -> None:
    done = invoke("generate", "q", "-n", "2", "--temperature", "1")
    assert done.stdout == "--- prompt 1, answer 1 ---\nq#0\n--- prompt 1, answer 2 ---\nq#1\n"


def test_chat_puts_each_prompt_as_a_question(invoke: Invoke, fake: type[FakeLLM]) -> None:
    invoke("generate", "--chat", "why")
    invoke("generate", "--chat", "--system", "be brief", "why", "how")
    told = {"role": "system", "content": "be brief"}
    assert fake.made[0].conversations == [[{"role": "user", "content": "why"}]]
    assert fake.made[1].conversations == [
        [told, {"role": "user", "content": "why"}],
        [told, {"role": "user", "content": "how"}],
    ]


def test_stats_close_with_a_table_beside_the_answer(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in invoke("generate", "x", "--stats").stderr.splitlines()
        if line.startswith("│")
    }
    assert rows == {
        "launch mode": "graph",
        "CPU calls per decoded token": "1.25",
        "ms per token": "7.50",
        "tokens/s": "133.3",
        "padding waste": "12.5 %",
        "padded rows": "9",
        "rungs used": "1 x 63, 8 x 12",
        "prefill steps": "2",
        "recorded prefill steps": "1",
        "eager prefill: too_many_tokens": "1",
        "decode steps": "75",
        "decode launches per token": "0.125",
    }


def test_stats_of_loops_say_how_they_ended_and_what_ran_step_by_step(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "loop_launches": 4,
        "loop_steps": 70,
        "loop_ends": {"flag": 3, "arrival": 1},
        "single_steps": {"split batch": 5},
        "loop_gap_ms": 0.125,
    }
    for name, value in told.items():
        monkeypatch.setattr(f"fake_engine.STATS.{name}", value)
    lines = [line.split("│") for line in invoke("generate", "x", "--stats").stderr.splitlines() if "│" in line]
    rows = {line[1].strip(): line[2].strip() for line in lines}
    assert rows["loops"] == "4 for 70 steps"
    assert rows["loops ended by"] == "arrival x 1, flag x 3"
    assert rows["median gap between loops"] == "0.12 ms"
    assert rows["step by step: split batch"] == "5"


def test_steps_that_ran_eager_are_shown_with_their_reason(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_engine.STATS.eager_steps", {"enforce_eager": 9})
    monkeypatch.setattr("fake_engine.STATS.rungs", {})
    shown = invoke("generate", "x", "--stats").stderr
    assert "eager: enforce_eager" in shown and "none" in shown


def test_rungs_recorded_again_are_shown_with_their_reason(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_engine.STATS.recaptures", {"a weight was replaced": 4})
    monkeypatch.setattr("fake_engine.STATS.verified_graphs", 8)
    shown = invoke("generate", "x", "--stats").stderr
    assert "recorded again: a weight was replaced" in shown and "recordings verified" in shown


def test_verify_graphs_reaches_the_engine_only_where_it_is_given(invoke: Invoke, fake: type[FakeLLM]) -> None:
    invoke("generate", "x")
    invoke("generate", "x", "--verify-graphs")
    assert "verify_graphs" not in fake.made[0].options
    assert fake.made[1].options["verify_graphs"] is True


def test_ctrl_c_keeps_what_was_written_shows_the_stats_and_leaves_with_130(
    invoke: Invoke, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "interrupt_after", 2)
    done = invoke("generate", "one two three four", "--stats")
    assert (done.exit_code, done.stdout) == (130, "one two\n")
    assert "launch mode" in done.stderr

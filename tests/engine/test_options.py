"""Unknown names are refused with the nearest name that exists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.engine.options import UnknownOptionError, nearest, reject_unknown
from mainspring.engine.settings import EngineSettings

OPTIONS = ("enforce_eager", "max_model_len", "max_num_seqs", "dtype", "gpu_memory_utilization")


def test_known_names_pass() -> None:
    reject_unknown(OPTIONS, OPTIONS, "LLM")
    reject_unknown([], OPTIONS, "LLM")


def test_every_unknown_name_is_told_with_its_nearest() -> None:
    with pytest.raises(UnknownOptionError) as told:
        reject_unknown(["max_num_seq", "dtype", "enforce-eager"], OPTIONS, "LLM")
    assert str(told.value) == (
        "LLM has no option 'max_num_seq' (did you mean 'max_num_seqs'?), "
        "'enforce-eager' (did you mean 'enforce_eager'?)"
    )


def test_where_nothing_is_near_the_names_that_exist_are_listed() -> None:
    with pytest.raises(UnknownOptionError, match="'qqq'; the options are dtype, enforce_eager, gpu_memory"):
        reject_unknown(["qqq"], OPTIONS, "LLM")


@given(st.sampled_from(OPTIONS), st.data())
def test_one_lost_letter_still_finds_the_name(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(name) - 1))
    assert nearest(name[:at] + name[at + 1 :], OPTIONS) == name


@pytest.mark.gpu
def test_no_engine_of_a_test_takes_a_whole_gpu() -> None:
    assert EngineSettings(model="tiny", device="cuda").num_gpu_blocks_override == 4096
    assert EngineSettings(model="tiny", device="cuda", num_gpu_blocks_override=7).num_gpu_blocks_override == 7
    assert EngineSettings(model="tiny", device="cuda", kv_cache_memory=5).kv_cache_memory == 5

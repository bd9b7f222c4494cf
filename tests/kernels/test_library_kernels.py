from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mainspring.kernels import (
    decode_attention,
    greedy,
    mask_stop_ids,
    rms_norm,
    rope_and_cache,
    sample,
    write_kv,
)


def test_the_room_is_imported_and_used_on_the_cpu_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, mainspring.kernels as k\n"
        "assert k.greedy(torch.eye(3)).tolist() == [0, 1, 2]\n"
        "assert not any(name.startswith('mainspring.kernels.triton') for name in sys.modules)\n"
        "others = ('graphs', 'models', 'engine', 'server', 'cli', 'bench')\n"
        "assert not any(name.startswith(f'mainspring.{o}') for name in sys.modules for o in others)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_recorder_sees_each_operation_whole() -> None:
    cache = torch.zeros(2, 4, 1, 8)
    one = torch.tensor([1])
    i32 = one.int()
    x = torch.randn(1, 1, 8)
    table = torch.ones(1, 1, dtype=torch.int32)
    f32 = torch.ones(1)
    logits = torch.randn(1, 9)
    qkv, cos_sin = torch.randn(1, 24), torch.zeros(2, 8)
    active = torch.ones(1, dtype=torch.bool)
    with torch.no_grad(), Recorder() as recorder:
        rms_norm(x, x[0, 0], 1e-5)
        recorder.names.clear()
        rope_and_cache(qkv, cos_sin, one, one, cache, cache)
        write_kv(x, x, cache, cache, one)
        decode_attention(x, cache, cache, table, i32, 1.0)
        mask_stop_ids(logits, table, active)
        greedy(logits)
        sample(logits, f32, i32, f32, f32, one, i32, i32)
    names = ["rope_and_cache", "write_kv", "decode_attention", "mask_stop_ids", "greedy", "sample"]
    assert recorder.names == [f"mainspring.{name}.default" for name in names]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("write_kv", ["k_cache", "v_cache"]),
        ("rope_and_cache", ["k_cache", "v_cache"]),
        ("mask_stop_ids", ["logits"]),
        ("decode_attention", []),
        ("sample", []),
    ],
)
def test_schemas_say_what_is_written(name: str, written: list[str]) -> None:
    schema = getattr(torch.ops.mainspring, name).default._schema
    marked = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert marked == written


def test_the_reference_of_sampling_has_no_data_dependent_shape() -> None:
    """The references can be recorded: none looks at the data to decide a shape."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mainspring.kernels.sampling import mask_stop_ids_reference, sample_reference
    from mainspring.kernels.sampling_extras import (
        add_logit_bias,
        apply_penalties,
        bad_word_endings,
        mask_not_allowed,
        token_logprobs,
    )

    with FakeTensorMode():
        logits, f32, i32 = torch.randn(2, 9), torch.ones(2), torch.ones(2, dtype=torch.int32)
        assert sample_reference(logits, f32, i32, f32, f32, i32.long(), i32, i32).shape == (2,)
        ids = torch.ones(2, 3, dtype=torch.int32)
        mask_stop_ids_reference(logits, ids, f32 > 0)
        apply_penalties(logits, logits.int(), logits > 0, f32, f32, f32)
        add_logit_bias(logits, ids, ids.float())
        mask_not_allowed(logits, logits > 0, f32 > 0)
        assert bad_word_endings(torch.ones(2, 4, 3), torch.ones(2, 2)).shape == (2, 4)
        assert token_logprobs(logits, i32, 3).top_ids.shape == (2, 3)

"""The operations that a decoder is made of, each with a plain torch reference and a Triton kernel.

One module an operation. The reference is the specification and the CPU path; CUDA tensors go to
:mod:`mainspring.kernels.triton`, which is imported at its first use. Operations are registered with torch's
dispatcher (``torch.ops.mainspring.*``), so that whoever records a step sees them. This room imports nothing
of the project.
"""

from __future__ import annotations

from mainspring.kernels.activation import silu_and_mul
from mainspring.kernels.attention import decode_attention, prefill_attention
from mainspring.kernels.kv_cache import write_kv
from mainspring.kernels.linear import LinearWeight, PackedLinearWeight, linear, pack_linear
from mainspring.kernels.norm import add_rms_norm, rms_norm
from mainspring.kernels.rope import apply_rope, rope_and_cache, rope_table
from mainspring.kernels.sampling import greedy, mask_stop_ids, sample

__all__ = [
    "LinearWeight",
    "PackedLinearWeight",
    "add_rms_norm",
    "apply_rope",
    "decode_attention",
    "greedy",
    "linear",
    "mask_stop_ids",
    "pack_linear",
    "prefill_attention",
    "rms_norm",
    "rope_and_cache",
    "rope_table",
    "sample",
    "silu_and_mul",
    "write_kv",
]

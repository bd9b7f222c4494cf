"""vLLM's offline ``LLM``, in the settings that its users have, prefix caching apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mainspring.bench.peers.base import Peer, PeerError, PeerSpec

#: Share of the GPU's memory for vLLM, so that it fits beside what this process keeps.
MEMORY_SHARE = 0.6


class VllmPeer:
    """An offline engine of vLLM."""

    def __init__(self, engine: Any, params: type[Any], spec: PeerSpec) -> None:
        self._engine = engine
        self._params = params
        self._sampling = dict(spec.sampling) or {"temperature": 0.0}

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """See ``Peer``. Raises ``PeerError`` where other than ``tokens`` tokens come back."""
        params = self._params(max_tokens=tokens, ignore_eos=True, detokenize=False, **self._sampling)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        started = time.perf_counter()
        outputs = self._engine.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        made = {len(output.outputs[0].token_ids) for output in outputs}
        if made != {tokens}:
            raise PeerError(f"vllm made {sorted(made)} tokens instead of {tokens}")
        return seconds


def load(spec: PeerSpec) -> Peer:
    """Start vLLM on the model that ``spec`` names, a folder. Raises ``PeerError`` for a GGUF file."""
    if spec.path.endswith(".gguf"):
        raise PeerError(f"vllm is measured on folders and named shapes, not on {spec.path}")
    import vllm

    engine = vllm.LLM(
        model=spec.path,
        dtype=spec.dtype,
        load_format=spec.load_format,
        skip_tokenizer_init=True,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        enable_prefix_caching=False,
        enforce_eager=spec.launch_mode == "eager",
        gpu_memory_utilization=MEMORY_SHARE,
        seed=spec.seed,
    )
    return VllmPeer(engine, vllm.SamplingParams, spec)

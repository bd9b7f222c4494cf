"""``transformers`` and its ``generate``, as its users call it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from mainspring.bench.peers.base import Peer, PeerError, PeerSpec


class TransformersPeer:
    """A causal model and its ``generate``."""

    def __init__(self, model: Any, spec: PeerSpec) -> None:
        self._model = model
        self._device = torch.device(spec.device)
        self._sampling = dict(spec.sampling)
        self._seed = int(self._sampling.pop("seed", spec.seed))
        if self._sampling:
            self._sampling["top_k"] = 0  # 50 unless told otherwise

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """See ``Peer``. Raises ``PeerError`` where other than ``tokens`` tokens come back."""
        ids = torch.tensor(prompts, device=self._device)
        torch.manual_seed(self._seed)
        self._wait()
        started = time.perf_counter()
        made = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=bool(self._sampling),
            max_new_tokens=tokens,
            pad_token_id=0,
            **self._sampling,
        )
        self._wait()
        seconds = time.perf_counter() - started
        if made.shape[1] != ids.shape[1] + tokens:
            raise PeerError(f"transformers made {made.shape[1] - ids.shape[1]} tokens instead of {tokens}")
        return seconds

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def load(spec: PeerSpec) -> Peer:
    """Load or make up the model that ``spec`` names."""
    path, dtype = Path(spec.path), getattr(torch, spec.dtype)
    torch.manual_seed(spec.seed)
    transformers.utils.logging.disable_progress_bar()
    if spec.load_format == "dummy":
        config = transformers.AutoConfig.from_pretrained(path)
        with torch.device(spec.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    elif path.suffix == ".gguf":
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    # Only the number of tokens is to end an answer, and only what is asked for is to choose its tokens.
    model.generation_config = transformers.GenerationConfig()
    return TransformersPeer(model.to(spec.device).eval(), spec)

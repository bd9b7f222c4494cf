"""Greedy token ids equal those of transformers' own ``generate`` in fp32, except past an exact near-tie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from mainspring import LLM, SamplingParams
from mainspring.models.source import resolve

TIE = 1e-4

PROMPTS = [
    "Here is the English alphabet: ABC",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "The three laws of motion are",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,",
    "In the year 1969,",
    "La capitale de l'Italie est",
    "Steps:\n\n1. a",
    "The quick brown fox",
    "SELECT name FROM",
    "A haiku about autumn:\n",
    "Q: What is a prime number?\nA:",
    "The opposite of hot is",
    "import numpy as np\n",
    "My favourite food is",
    "The mitochondria is",
    "Hello",
]


def assert_greedy_equal(
    reference: transformers.PreTrainedModel, llm: LLM, prompts: list[list[int]], length: int
) -> tuple[int, int]:
    """Compare ``length`` greedy tokens of each prompt; returns (tokens compared, prompts cut short by a tie)."""
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    compared = ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = reference.generate(
            torch.tensor([prompt], device=reference.device),
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        expected = generated.sequences[0, len(prompt) :].tolist()
        actual = output.outputs[0].token_ids
        assert len(actual) == length
        for step in range(length):
            best = generated.logits[step][0].topk(2).values
            if float(best[0] - best[1]) < TIE:
                ties += 1
                print(f"tie within {TIE} at step {step} of prompt {prompt[:8]}...: not compared further")
                break
            assert actual[step] == expected[step], f"prompt {prompt[:8]}, step {step}"
            compared += 1
    return compared, ties


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_on_twenty_prompts(smollm2: LLM) -> None:
    source = resolve("smollm2")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    ).eval()
    prompts = [smollm2.core.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    compared, ties = assert_greedy_equal(reference, smollm2, prompts, 64)
    print(f"compared {compared} tokens; {ties} prompts ended in a tie")
    assert ties <= 2


SMALL = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.2,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama2": transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 4}, tie_word_embeddings=False),
    "llama3": transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None, tie_word_embeddings=False),
    "mistral-window": transformers.MistralConfig(**SMALL, sliding_window=24, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen2-tied": transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_small_random_model_of_each_family(family: str, device: str, tmp_path: Path) -> None:
    torch.manual_seed(sum(map(ord, family)))
    reference = transformers.AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    prompts = [torch.randint(3, 320, (length,)).tolist() for length in (1, 5, 16, 17, 33, 70)]
    with LLM(
        str(tmp_path),
        device=device,
        dtype="float32",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=200,
        max_num_seqs=4,
        max_num_batched_tokens=32,
    ) as llm:
        compared, ties = assert_greedy_equal(reference.to(device), llm, prompts, 64)
    print(f"{family} on {device}: compared {compared} tokens; {ties} prompts ended in a tie")
    assert compared > 64 * len(prompts) // 2

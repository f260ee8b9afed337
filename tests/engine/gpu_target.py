"""A random Llama that GPU attention back-ends accept (head size 64), made on the spot."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512


def write_target(folder: Path, seed: int = 0) -> str:
    """Write a random 8-layer target of 512 tokens to `folder`; needs no network."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)

"""A tiny target for the trainer: 8 random Llama layers over bytes, and texts that it wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_dart.draft.checkpoint import DartConfig
from sglang_dart.draft.dart import DartHead, dart_taps
from sglang_dart.draft.dflash import DFlashModel
from sglang_dart.draft.dflash_config import DFlashConfig, DominoConfig
from sglang_dart.draft.domino import DominoModel
from sglang_dart.train.block_method import BlockMethod
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.method import Batch, DartMethod
from sglang_dart.train.shards import Sample, write_shard

VOCAB = 264
END = 258
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tiny_llama(tied: bool = True) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=257,
        eos_token_id=END,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def byte_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<|end|>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """A byte tokenizer with the given chat template."""
    return byte_tokenizer


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as a Hugging Face folder, tokenizer and chat template included."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = byte_tokenizer()
    model = tiny_llama()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_llama(), dart_taps(8))


@pytest.fixture(scope="session")
def texts(target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 96 texts: random prompts of 4 .. 12 tokens, answers of 24 by the target."""
    folder = tmp_path_factory.mktemp("texts")
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in range(4, 12):
        prompt = torch.randint(0, 256, (12, length), generator=generator)
        torch.manual_seed(length)
        out = target.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            do_sample=True,
            temperature=0.5,
            pad_token_id=END,
        )
        for row in out.tolist():
            mask = [0] * length + [1] * (len(row) - length)
            samples.append(Sample(row, mask, 0, 0.5, "test"))
    order = np.random.default_rng(0).permutation(len(samples))
    for shard, part in enumerate(np.array_split(order, 3)):
        write_shard(folder / f"shard-{shard:06d}.parquet", [samples[i] for i in part], {})
    return folder


@pytest.fixture
def tiny_head() -> DartHead:
    """A random head with 3 masks for 160 of the target's 264 tokens."""
    config = DartConfig(
        vocab_size=VOCAB,
        draft_vocab_size=160,
        hidden_size=24,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        target_hidden_size=24,
        draft_length=3,
        rms_norm_eps=1e-5,
        rope_theta=1000.0,
    )
    torch.manual_seed(3)
    head = DartHead(config)
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        torch.nn.init.uniform_(getattr(head.midlayer, norm).weight, 0.5, 1.5)
    torch.nn.init.uniform_(head.norm.weight, 0.5, 1.5)
    kept = torch.randperm(VOCAB)[:160].sort().values
    head.d2t.copy_(kept - torch.arange(160))
    return head


@pytest.fixture
def make_method(tiny_head: DartHead, target: FrozenTarget) -> Callable[..., DartMethod]:
    """The tiny head in training; `make_method(final_norm_passes=..., chunk=...)`."""

    def make(**options: int) -> DartMethod:
        settings = {"gamma": 0.6, "final_norm_passes": 2} | options
        embedding = target.model.get_input_embeddings().weight
        return DartMethod(tiny_head, embedding, target.lm_head, **settings)

    return make


@pytest.fixture
def make_batch() -> Callable[..., tuple[Batch, torch.Tensor]]:
    """Random texts: two of them, of lengths 19 and 13, the first with two answers."""

    def make(method: DartMethod | BlockMethod) -> tuple[Batch, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, VOCAB, (2, 19), generator=generator)
        turn = torch.zeros(2, 19, dtype=torch.int64)
        turn[0, 4:9], turn[0, 12:19], turn[1, 3:13] = 1, 2, 1
        ids[1, 13:] = 0
        return Batch(ids, method.rows(turn, [(0,), (1,)]), [0, 1]), turn

    return make


BLOCK_TAPS = [1, 4, 6]
MASK = 263


@pytest.fixture(scope="session")
def block_target() -> FrozenTarget:
    """The target, tapped for block drafters."""
    return FrozenTarget(tiny_llama(), BLOCK_TAPS)


@pytest.fixture
def make_block_method(block_target: FrozenTarget) -> Callable[..., BlockMethod]:
    """A random drafter of 2 layers and blocks of 6 in training.

    `make_block_method("dflash")`, or "domino" with shift_label=..., and options of BlockMethod.
    """

    def make(kind: str, shift_label: bool = True, **options: float) -> BlockMethod:
        domino = DominoConfig(shift_label=shift_label, emb_dim=5, gru_hidden_dim=7)
        config = DFlashConfig(
            vocab_size=VOCAB,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            rms_norm_eps=1e-5,
            rope_theta=1000.0,
            block_size=6,
            mask_token_id=MASK,
            target_layer_ids=BLOCK_TAPS,
            domino=domino if kind == "domino" else None,
        )
        torch.manual_seed(3)
        model = DominoModel(config) if kind == "domino" else DFlashModel(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.normal_(parameter, std=0.5 if "embed_proj" in name else 0.2)
        settings = {"mask_token_id": MASK, "anchors": 4, "decay": 7.0} | options
        embedding = block_target.model.get_input_embeddings().weight
        return BlockMethod(model, embedding, block_target.lm_head, **settings)

    return make

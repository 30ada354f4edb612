"""Tiny random targets and a word tokenizer: everything that needs no real model uses these."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s> ' + m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant' }}{% endif %}"
)


def _has_ignore_length_per_row() -> bool:
    try:
        RepetitionPenaltyLogitsProcessor(1.1, prompt_ignore_length=torch.tensor([1]))
    except ValueError:
        return False
    return True


# Newer Transformers take one length per row of the batch.
HAS_IGNORE_LENGTH_PER_ROW = _has_ignore_length_per_row()


def tiny_llama(
    vocab: int = 96, layers: int = 4, seed: int = 0, hidden: int = 32, **overrides: Any
) -> LlamaForCausalLM:
    """A random fp32 Llama with grouped-query attention, without an EOS token."""
    config = LlamaConfig(
        **{
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
            # Larger than the usual 0.02, so that the argmax depends on the context.
            "initializer_range": 0.2,
            **overrides,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()


def tiny_tokenizer(vocab: int = 96, chat: bool = True) -> PreTrainedTokenizerFast:
    """Words ``w0 w1 ...`` plus special tokens; one word, one id."""
    words = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system"]
    words += [f"w{number}" for number in range(vocab - len(words))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer

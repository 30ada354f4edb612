"""Whether a drafter and a target belong together.

A drafter is bound to its target's widths, depth and token ids. A wrong pair would not crash: it
would draft nonsense and make decoding slower, so it is refused before any work, with everything
that differs in one message.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedConfig

from ..config import Eagle4Config


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 over the vocabulary (token -> id, sorted) and the ids of BOS and EOS.

    The padding token is left out: it means nothing to a drafter, and users assign it freely.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    special = [getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")]
    return hashlib.sha256(json.dumps([vocabulary, special]).encode()).hexdigest()


def check_pair(
    drafter_config: Eagle4Config, target_config: PreTrainedConfig, tokenizer: Any = None
) -> None:
    """Raise `ValueError` listing every mismatch: what the drafter needs and what the target has.

    The tokenizer is checked when one is given and the drafter stores a fingerprint.
    """
    text = target_config.get_text_config(decoder=True)
    wrong = _size_mismatches(drafter_config, text)
    stored = drafter_config.tokenizer_fingerprint
    if tokenizer is not None and stored is not None:
        actual = tokenizer_fingerprint(tokenizer)
        if actual != stored:
            wrong.append(
                f"tokenizer fingerprint: drafter needs {stored[:12]}..., tokenizer has "
                f"{actual[:12]}...; use the tokenizer that the drafter was trained with"
            )
    if wrong:
        raise ValueError("this drafter was made for another target:\n- " + "\n- ".join(wrong))


def _size_mismatches(drafter: Eagle4Config, text: Any) -> list[str]:
    hidden = text.hidden_size
    embedding = getattr(text, "embedding_size", None) or getattr(text, "word_embed_proj_dim", None)
    advice = "use a drafter that was trained for this target"
    rows = [
        ("width of the tapped features", drafter.target_hidden_size, hidden, advice),
        ("vocabulary size", drafter.vocab_size, text.vocab_size, advice),
        ("number of target layers", drafter.num_target_layers, text.num_hidden_layers, advice),
    ]
    for name, is_own, width in (
        ("embedding", drafter.own_embed_tokens, embedding or hidden),
        ("LM head", drafter.own_lm_head, hidden),
    ):
        if not is_own:
            hint = f"give the drafter its own {name}"
            rows.append((f"width of the borrowed {name}", drafter.hidden_size, width, hint))
    wrong = [
        f"{what}: drafter needs {needed}, target has {has}; {todo}"
        for what, needed, has, todo in rows
        if needed != has
    ]
    beyond = [tap for tap in drafter.tap_layers if tap >= text.num_hidden_layers]
    if beyond:
        wrong.append(
            f"tap layers: drafter needs {beyond}, target has blocks 0.."
            f"{text.num_hidden_layers - 1}; {advice}"
        )
    return wrong

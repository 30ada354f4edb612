"""eagle4: EAGLE-4 speculative decoding for Hugging Face causal LMs, without changing the output."""

from . import demo
from .config import Eagle4Config, SpeculativeConfig
from .drafter import Eagle4Drafter
from .modeling import Eagle4ForCausalLM

__all__ = ["Eagle4Config", "Eagle4Drafter", "Eagle4ForCausalLM", "SpeculativeConfig", "demo"]

"""The cache: paged, slot-addressed keys and values of target and drafter, and recurrent state.

In: rows of one forward with their sequence, window offset, position and visibility.
Out: an `AttentionStep` (where to write, what each row sees) and the pools that it addresses.
Always: committed token ``i`` of a sequence sits at index ``i`` of its page list, so the layout is
what plain decoding leaves; drafted rows live behind the committed prefix until they are compacted.
Recurrent state is that of the committed tokens; drafted rows never touch it.
"""

from .layer import LayerStep, attend_layer
from .mixing import convolve, mix
from .pages import PageTable
from .pool import KVPool
from .recurrent import RecurrentPool, StateRows, StateShape
from .scratch import Expanded, Scratch, make_scratch, scratch_layer
from .step import AttentionStep, StepParts, Window, attend, build_step

__all__ = ["AttentionStep", "Expanded", "KVPool", "LayerStep", "PageTable", "RecurrentPool"]
__all__ += ["Scratch", "StateRows", "StateShape", "StepParts", "Window", "attend", "attend_layer"]
__all__ += ["build_step", "convolve", "make_scratch", "mix", "scratch_layer"]

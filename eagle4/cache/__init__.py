"""The cache: paged, slot-addressed keys and values of target and drafter.

In: rows of one forward with their sequence, window offset, position and visibility.
Out: an `AttentionStep` (where to write, what each row sees) and the pools that it addresses.
Always: committed token ``i`` of a sequence sits at index ``i`` of its page list, so the layout is
what plain decoding leaves; drafted rows live behind the committed prefix until they are compacted.
"""

from .layer import LayerStep, attend_layer
from .pages import PageTable
from .pool import KVPool
from .step import AttentionStep, Window, attend, build_step

__all__ = ["AttentionStep", "KVPool", "LayerStep", "PageTable", "Window"]
__all__ += ["attend", "attend_layer", "build_step"]

"""Training: from a target and prompts to a drafter.

In: prompts (`prompts`, `dialects`), the target's answers to them (`answers`), its features on disk
(`extract`, `features`). Out: a drafter folder in the serving layout with held-out metrics, a card
and curves (`recipe`).
Always: the unrolled drafter computes what serving computes (`ttt`), losses are float32, what the
target lends stays the target's, the engine measures which checkpoint is kept (`judge`),
one process or many compute the same step, every file is replaced whole and every run resumes.
"""

from .features import FeatureStore, FeatureWriter
from .recipe import train_drafter
from .settings import TrainConfig

__all__ = ["FeatureStore", "FeatureWriter", "TrainConfig", "train_drafter"]

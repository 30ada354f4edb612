"""Training: from a target and prompts to a drafter.

In: prompts (`data`), the target's answers to them, its features on disk (`extract`, `features`).
Out: a drafter folder in the serving layout with held-out metrics (`recipe`).
Always: the unrolled drafter computes what serving computes (`ttt`), losses are float32, the
embedding and LM head stay the target's, every file is replaced atomically and every run resumes.
"""

from .features import FeatureStore, FeatureWriter
from .recipe import train_drafter
from .settings import TrainConfig

__all__ = ["FeatureStore", "FeatureWriter", "TrainConfig", "train_drafter"]

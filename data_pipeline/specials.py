"""The ids that stand for no text."""

from typing import NamedTuple

import numpy as np


class Specials(NamedTuple):
    """Where a vocabulary has its special ids."""

    pad: int = 0
    unk: int = 1
    cls: int = 2
    sep: int = 3
    mask: int = 4

    def among(self, ids: np.ndarray) -> np.ndarray:
        """Return bool [N]: which of `ids` [N] are special."""
        if self == STANDARD:
            return ids < len(self)
        return np.isin(ids, self)

    def skip(self, ordinals: np.ndarray) -> np.ndarray:
        """Return the ids that are not special of given ordinals among those [N]."""
        for special in sorted(self):
            ordinals = ordinals + (ordinals >= special)
        return ordinals


STANDARD = Specials()
"""Those of every vocabulary that is trained here."""
NUM_SPECIALS = len(STANDARD)

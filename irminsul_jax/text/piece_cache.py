"""A bounded, thread-safe cache from text to its token ids; the least recently used texts go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np


class PieceCache:
    """Holds texts of at most `max_characters` in total (a longer text is tokenised and not kept)."""

    def __init__(self, max_characters: int = 64_000_000) -> None:
        self._max = max_characters
        self._size = 0
        self._pieces: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self.tokenized_characters = 0
        """Characters that had to be tokenised so far."""

    def get(self, texts: Sequence[str], encode_batch: Callable[[Sequence[str]], list[list[int]]]) -> list[np.ndarray]:
        found: dict[str, np.ndarray] = {}
        with self._lock:
            for text in texts:
                if (ids := self._pieces.get(text)) is not None:
                    self._pieces.move_to_end(text)
                    found[text] = ids
        missing = list(dict.fromkeys(text for text in texts if text not in found))
        if missing:
            fresh = dict(zip(missing, map(_frozen, encode_batch(missing)), strict=True))
            found |= fresh
            with self._lock:
                self._insert(fresh)
        return [found[text] for text in texts]

    def _insert(self, fresh: dict[str, np.ndarray]) -> None:
        self.tokenized_characters += sum(map(len, fresh))
        for text, ids in fresh.items():
            if text not in self._pieces and len(text) <= self._max:
                self._pieces[text] = ids
                self._size += len(text)
        while self._size > self._max:
            dropped, _ = self._pieces.popitem(last=False)
            self._size -= len(dropped)


def _frozen(ids: list[int]) -> np.ndarray:
    array = np.asarray(ids, np.int32)
    array.flags.writeable = False
    return array

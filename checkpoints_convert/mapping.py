"""The vocabulary of a mapping table: which rows of which source tensor become which parameter. No model is named here.

A source matrix is `[rows, columns]` (outputs × inputs). `Piece.axes` turns the parameter (or one expert of it) around so
that its leading axes enumerate the chosen rows and its trailing axes the columns; filling it is then one assignment per
block of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from checkpoints_convert.source import SourceCheckpoint
from irminsul_jax.config import ModelConfig
from irminsul_jax.errors import ConversionError


@dataclass(frozen=True, kw_only=True)
class Piece:
    source: str
    """Name of the tensor in the Hugging Face checkpoint."""
    source_shape: tuple[int, ...]
    axes: tuple[int, ...] = (0,)
    """Transposition of the parameter into (row axes…, column axes…)."""
    row_axes: int = 1
    rows: Int[np.ndarray, "N"] | None = None
    """Source row of each parameter row; None where they are the same."""
    expert: int | None = None
    """Position in the leading axis of a stacked parameter."""


Rules = dict[str, tuple[Piece, ...]]
"""Parameter path (below its layer, or at the top) → the pieces that fill it."""


def copied(source: str, *shape: int) -> tuple[Piece, ...]:
    return (Piece(source=source, source_shape=shape, axes=tuple(range(len(shape)))),)


def transposed(source: str, rows: int, columns: int) -> tuple[Piece, ...]:
    return (Piece(source=source, source_shape=(rows, columns), axes=(1, 0)),)


def stacked_transposed(source: str, experts: int, rows: int, columns: int) -> tuple[Piece, ...]:
    """`source` contains `{expert}`."""
    return tuple(
        Piece(source=source.format(expert=e), source_shape=(rows, columns), axes=(1, 0), expert=e)
        for e in range(experts)
    )


def half_split(width: int) -> Int[np.ndarray, "D"]:
    """Order that turns interleaved rotary pairs (x0 y0 x1 y1 …) into halves (x0 x1 … y0 y1 …)."""
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def head_rows(heads: int, head_width: int, within: Int[np.ndarray, "W"]) -> Int[np.ndarray, "N"]:
    """Rows `within` of every head, of a matrix whose rows are heads × head_width."""
    return (np.arange(heads)[:, None] * head_width + within).reshape(-1)


def fill(parameter: np.ndarray, pieces: tuple[Piece, ...], source: SourceCheckpoint) -> Iterator[int]:
    """Fills `parameter` from its pieces, block by block; yields the number of bytes filled, for progress reports.

    Raises `ConversionError` naming the source tensor if a value is not finite.
    """
    for piece in pieces:
        tensor = source.tensors[piece.source]
        target = parameter if piece.expert is None else parameter[piece.expert]
        view = target.transpose(piece.axes)
        row_shape, column_shape = view.shape[: piece.row_axes], view.shape[piece.row_axes :]
        target_row = np.arange(math.prod(row_shape))
        if piece.rows is not None:
            target_row = np.full(tensor.shape[0], -1)
            target_row[piece.rows] = np.arange(len(piece.rows))
        for first, block in tensor.row_blocks(source.scale_of(tensor)):
            wanted = target_row[first : first + len(block)]
            chosen = wanted >= 0
            if not chosen.any():
                continue
            if not chosen.all():
                block = block[chosen]
            if not np.isfinite(block).all():
                raise ConversionError(
                    f"{tensor.file}: tensor {tensor.name} contains NaN or infinity; the file is damaged, download it again"
                )
            values = block.astype(parameter.dtype).reshape(-1, *column_shape)
            view[np.unravel_index(wanted[chosen], row_shape)] = values
            yield values.nbytes


def top_rules(config: ModelConfig) -> Rules:
    """Parameters outside the layers, named alike in every family."""
    vocab, hidden = config.vocab_size, config.hidden_dim
    rules = {
        "embedding": copied("model.embed_tokens.weight", vocab, hidden),
        "norm": copied("model.norm.weight", hidden),
    }
    if not config.tie_embeddings:
        rules["lm_head"] = transposed("lm_head.weight", vocab, hidden)
    return rules

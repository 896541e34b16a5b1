"""From logits to the distributions that are sampled from: temperature, then top-k, top-p, min-p, softmax.

The one implementation for p and q. Order and meaning are those of transformers' warpers, ties included, but the
vocabulary is not sorted: one comparison drops what the filters cannot keep, and the few tokens left are finished on the
host.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from services.common.specdec.types import Row, SamplingParams

_Floats = npt.NDArray[np.float32]


def distributions(logits: torch.Tensor, params: SamplingParams) -> list[Row]:
    """Return one float32 row for each row of logits, sparse where that is smaller on the wire.

    A row with NaN or +inf in it, or with nothing but -inf, comes out as NaN: never as a plausible token.

    Args:
        logits: float[rows, vocab], on any device.
        params: What to do with them.
    """
    scores = logits.float()
    best = scores.amax(dim=-1, keepdim=True)
    usable = torch.isfinite(best).flatten().tolist()
    if not all(usable):
        scores, best = torch.where(torch.isfinite(best), scores, 0), torch.where(torch.isfinite(best), best, 0)
    if params.temperature == 0:
        rows = [Row.point_mass(token) for token in scores.argmax(dim=-1).tolist()]
    else:
        # Shifted before it is divided, so that a tiny temperature cannot overflow: the best score is 0.
        rows = _sampled((scores - best).div_(params.temperature), params)
    return [row if good else _bad_row() for row, good in zip(rows, usable, strict=True)]


def is_bad(row: Row) -> bool:
    """Tell whether a row of `distributions` came of logits that are none."""
    return len(row.weights) == 1 and bool(np.isnan(row.weights[0]))


def _bad_row() -> Row:
    return Row(np.full(1, np.nan, np.float32), np.zeros(1, np.uint32))


def _sampled(scores: torch.Tensor, params: SamplingParams) -> list[Row]:
    """Return the rows of shifted and scaled scores: float32[rows, vocab], the best of each row 0."""
    vocab_size = scores.shape[1]
    # Mass of what the comparison drops, where a later top-p has to count it.
    dropped = torch.zeros(len(scores))
    if 0 < params.top_k < vocab_size:
        kept = scores >= torch.topk(scores, params.top_k).values[:, -1:]
    elif params.top_p < 1:
        # The tokens under this bound hold together at most half of what top-p drops, so it drops each of them.
        masses = scores.exp()
        kept = masses > masses.sum(dim=-1, keepdim=True) * ((1 - params.top_p) / (2 * vocab_size))
        dropped = masses.masked_fill_(kept, 0).sum(dim=-1).cpu()
    elif params.min_p > 0:
        kept = scores >= math.log(params.min_p)
    else:
        return [_smaller_form(weights) for weights in torch.softmax(scores, dim=-1).cpu().numpy()]
    at = np.flatnonzero(kept.cpu().numpy())
    survivors = scores.flatten()[torch.from_numpy(at).to(scores.device)].cpu().numpy()
    row_ends = np.searchsorted(at, vocab_size * np.arange(1, len(scores)))
    parts = zip(np.split(at % vocab_size, row_ends), np.split(survivors, row_ends), dropped.numpy(), strict=True)
    return [_finish(ids, left, mass, params, vocab_size) for ids, left, mass in parts]


def _finish(
    ids: npt.NDArray[np.int64], scores: _Floats, dropped: np.float32, params: SamplingParams, vocab_size: int
) -> Row:
    """Apply top-p and min-p to what is left of one row, and normalise it.

    Args:
        ids: int64[n], ascending.
        scores: float32[n].
        dropped: Mass already dropped, on the scale of exp(scores).
        params: Of which top_p and min_p are applied.
        vocab_size: Entries of a dense row.
    """
    keep = np.ones(len(ids), np.bool_)
    if params.top_p < 1:
        keep = _top_p(scores, dropped, params.top_p)
    if params.min_p > 0:
        keep &= scores >= math.log(params.min_p)
    weights = np.exp(scores[keep])
    weights /= weights.sum()
    ids, positive = ids[keep], weights > 0
    if 2 * len(ids) < vocab_size:
        return Row(weights[positive], ids[positive].astype(np.uint32))
    dense = np.zeros(vocab_size, np.float32)
    dense[ids] = weights
    return _smaller_form(dense)


def _top_p(scores: _Floats, dropped: np.float32, top_p: float) -> npt.NDArray[np.bool_]:
    """Return which scores top-p keeps: those whose mass, with that of all less likely ones, exceeds 1 - top_p.

    In float32 and in ascending stable order, as transformers does it: of tied tokens the later ones stay.
    """
    masses = np.exp(scores)
    total = masses.sum() + dropped
    order = np.argsort(scores, kind="stable")
    up_to = (np.cumsum(masses[order] / total, dtype=np.float64) + dropped / total).astype(np.float32)
    keep = np.empty(len(scores), np.bool_)
    keep[order] = up_to > np.float32(1 - top_p)
    keep[order[-1:]] = True
    return keep


def _smaller_form(weights: _Floats) -> Row:
    """Return dense weights as a row; an entry of a sparse one takes 8 bytes, of a dense one 4."""
    if 2 * np.count_nonzero(weights) >= len(weights):
        return Row(weights)
    ids = np.flatnonzero(weights)
    return Row(weights[ids], ids.astype(np.uint32))

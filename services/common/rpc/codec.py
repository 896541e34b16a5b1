"""Domain types to messages and back. Rows are views over the message's bytes: nothing is copied that need not be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.v1 import distribution_pb2, worker_pb2
from services.common.specdec.errors import InvalidFieldError
from services.common.specdec.types import BadRowError, Row, SamplingParams

FLOAT = np.dtype("<f4")
ID = np.dtype("<u4")


def encode_row(row: Row) -> distribution_pb2.Distribution:
    """Return a row as a message, float32 little endian."""
    weights = row.weights.astype(FLOAT, copy=False).tobytes()
    if row.ids is None:
        return distribution_pb2.Distribution(dense=weights)
    return distribution_pb2.Distribution(
        sparse=distribution_pb2.SparseDistribution(ids=row.ids.astype(ID, copy=False).tobytes(), probabilities=weights)
    )


def decode_row(message: distribution_pb2.Distribution) -> Row:
    """Return the row that a message carries, as views over its bytes.

    A message without a form, or whose bytes are no whole number of entries, becomes an empty row, which `check_row`
    refuses when (and only when) the round reaches it.
    """
    try:
        if message.HasField("sparse"):
            sparse = message.sparse
            return Row(_view(sparse.probabilities, FLOAT), _view(sparse.ids, ID))
        return Row(_view(message.dense, FLOAT))
    except BadRowError:
        return Row(np.empty(0, FLOAT))


def encode_sampling(params: SamplingParams) -> worker_pb2.SamplingParams:
    """Return sampling parameters as a message with every field set."""
    return worker_pb2.SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )


def decode_sampling(message: worker_pb2.SamplingParams, defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a message, unset fields taken from `defaults`.

    Raises:
        InvalidFieldError: A value outside its limits.
    """
    params = SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else defaults.temperature,
        top_k=message.top_k if message.HasField("top_k") else defaults.top_k,
        top_p=message.top_p if message.HasField("top_p") else defaults.top_p,
        min_p=message.min_p if message.HasField("min_p") else defaults.min_p,
    )
    # Written so that a NaN, for which every comparison is false, is refused.
    if params.temperature != 0 and not 1e-6 <= params.temperature <= 100:
        raise InvalidFieldError("sampling.temperature", params.temperature, "0 (greedy), or 1e-6 to 100")
    if not params.top_k >= 0:
        raise InvalidFieldError("sampling.top_k", params.top_k, "0 (keep all) or more")
    if not 0 < params.top_p <= 1:
        raise InvalidFieldError("sampling.top_p", params.top_p, "above 0 and at most 1")
    if not 0 <= params.min_p <= 1:
        raise InvalidFieldError("sampling.min_p", params.min_p, "0 to 1")
    return params


def _view(data: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise BadRowError(f"{len(data)} bytes are no whole number of entries of {dtype.itemsize}")
    return np.frombuffer(data, dtype)

"""Domain types to messages and back. Rows are views over the message's bytes: nothing is copied that need not be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.v1 import distribution_pb2, worker_pb2
from services.common.specdec.errors import InvalidFieldError
from services.common.specdec.partial import AnyRow, Ids, PartialRow
from services.common.specdec.types import BadRowError, Row, SamplingParams, VerificationMode

FLOAT = np.dtype("<f4")
ID = np.dtype("<u4")
_VERIFICATIONS = {
    VerificationMode.TOKEN: worker_pb2.VERIFICATION_TOKEN,
    VerificationMode.COUPLED: worker_pb2.VERIFICATION_COUPLED,
}


def encode_row(row: AnyRow) -> distribution_pb2.Distribution:
    """Return a row as a message, float32 little endian."""
    if isinstance(row, PartialRow):
        return _encode_partial(row)
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


def decode_target_row(message: distribution_pb2.Distribution, support: Ids | None) -> AnyRow:
    """Return a row of p; it may have come in part where it was asked for over a support. See `decode_row`."""
    if support is None or not message.HasField("partial"):
        return decode_row(message)
    partial = message.partial
    try:
        return PartialRow(
            support,
            _view(partial.support, FLOAT),
            _view(partial.head_ids, ID),
            _view(partial.head_probabilities, FLOAT),
            partial.tail_mass,
            (partial.tail_winner, partial.tail_score) if partial.HasField("tail_winner") else None,
        )
    except BadRowError:
        return Row(np.empty(0, FLOAT))


def _encode_partial(row: PartialRow) -> distribution_pb2.Distribution:
    partial = distribution_pb2.PartialDistribution(
        support=row.weights.astype(FLOAT, copy=False).tobytes(),
        head_ids=row.head_ids.astype(ID, copy=False).tobytes(),
        head_probabilities=row.head_weights.astype(FLOAT, copy=False).tobytes(),
        tail_mass=row.tail_mass,
    )
    if row.tail_winner is not None:
        partial.tail_winner, partial.tail_score = row.tail_winner
    return distribution_pb2.Distribution(partial=partial)


def encode_support(ids: Ids) -> bytes:
    """Return the ids of a support as VerifyRequest carries them."""
    return ids.astype(ID, copy=False).tobytes()


def decode_support(field: str, data: bytes, vocab_size: int) -> Ids:
    """Return the ids of a support.

    Raises:
        InvalidFieldError: They are no ascending ids of the vocabulary.
    """
    try:
        ids = _view(data, ID)
    except BadRowError:
        raise InvalidFieldError(field, f"{len(data)} bytes", f"ids of {ID.itemsize} bytes") from None
    if bad := np.flatnonzero(ids[1:] <= ids[:-1])[:1].tolist():
        raise InvalidFieldError(f"{field}[{bad[0] + 1}]", "not above the one before it", "ascending ids")
    if len(ids) and int(ids[-1]) >= vocab_size:
        raise InvalidFieldError(field, f"up to {ids[-1]}", f"ids of 0 to {vocab_size - 1}")
    return ids


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


def encode_verification(mode: VerificationMode) -> worker_pb2.Verification.ValueType:
    """Return a rule as the wire names it."""
    return _VERIFICATIONS[mode]


def decode_verification(field: str, value: int, default: VerificationMode) -> VerificationMode:
    """Return the rule that a field names, `default` where it is unset.

    Raises:
        InvalidFieldError: No rule has this number.
    """
    if value == worker_pb2.VERIFICATION_UNSPECIFIED:
        return default
    for mode, number in _VERIFICATIONS.items():
        if number == value:
            return mode
    names = " or ".join(f"{worker_pb2.Verification.Name(number)} ({number})" for number in _VERIFICATIONS.values())
    raise InvalidFieldError(field, value, names)


def _view(data: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise BadRowError(f"{len(data)} bytes are no whole number of entries of {dtype.itemsize}")
    return np.frombuffer(data, dtype)

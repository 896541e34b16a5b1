"""Rows: their two forms, and each way of being no distribution."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.specdec.types import BadRowError, Row, check_row
from tests.specdec.rows import VOCAB, dense, sparse

INF, NAN = float("inf"), float("nan")


def ids_row(ids: list[int], weights: list[float]) -> Row:
    return Row(np.array(weights, np.float32), np.array(ids, np.uint32))


@pytest.mark.parametrize(
    "row",
    [
        dense(0.25, 0.25, 0.25, 0.25),
        dense(0.0, 0.0, 0.0, 1.0),
        dense(0.2504, 0.25, 0.25, 0.25),  # rounding
        sparse({3: 1.0}),
        sparse({0: 0.5, 3: 0.5}),
        sparse({0: 0.0, 3: 1.0}),
        Row.point_mass(2),
        Row(np.full(4, 0.25, np.float32)),
    ],
)
def test_good_rows_pass(row: Row) -> None:
    check_row(row, VOCAB)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (dense(0.5, 0.5), "has 2 entries, the vocabulary 4"),
        (dense(0.2, 0.2, 0.2, 0.2, 0.2), "has 5 entries"),
        (dense(), "has 0 entries"),
        (dense(0.5, NAN, 0.25, 0.25), "non-finite entry at index 1"),
        (dense(0.5, 0.25, INF, 0.25), "non-finite entry at index 2"),
        (dense(0.5, 0.25, 0.25, -INF), "non-finite entry at index 3"),
        (dense(INF, 0.25, 0.25, -INF), "non-finite entry at index 0"),
        (dense(0.75, 0.5, -0.25, 0.0), "negative entry at index 2"),
        (dense(0.0, 0.0, 0.0, 0.0), "sums to 0"),
        (dense(0.25, 0.25, 0.25, 0.26), "sums to 1.01"),
        (dense(0.25, 0.25, 0.25, 0.24), "sums to 0.99"),
        (ids_row([], []), "sums to 0"),
        (ids_row([0, 1], [1.0]), "2 ids and 1 probabilities"),
        (ids_row([0], [0.5, 0.5]), "1 ids and 2 probabilities"),
        (ids_row([0, 4], [0.5, 0.5]), "not ascending below the vocabulary size 4"),
        (ids_row([5, 1], [0.5, 0.5]), "not ascending"),
        (ids_row([1, 1], [0.5, 0.5]), "not ascending"),
        (ids_row([0, 1], [0.5, NAN]), "non-finite entry at index 1"),
        (ids_row([0, 1], [1.5, -0.5]), "negative entry at index 1"),
        (ids_row([0, 1], [0.5, 0.4]), "sums to 0.9"),
    ],
)
def test_bad_rows_say_what_is_wrong(row: Row, says: str) -> None:
    with pytest.raises(BadRowError, match=says):
        check_row(row, VOCAB)


def test_huge_weights_are_no_distribution() -> None:
    with pytest.raises(BadRowError):
        check_row(Row(np.full(VOCAB, np.finfo(np.float32).max)), VOCAB)


def test_weight_and_dense_agree_in_both_forms() -> None:
    for row in (dense(0.0, 0.75, 0.0, 0.25), sparse({1: 0.75, 3: 0.25})):
        assert [row.weight(token) for token in range(6)] == [0, 0.75, 0, 0.25, 0, 0]
        np.testing.assert_array_equal(row.dense(VOCAB), [0, 0.75, 0, 0.25])
        assert row.dense(VOCAB).dtype == np.float64


def test_nbytes_is_what_the_wire_carries() -> None:
    assert Row(np.zeros(10, np.float32)).nbytes == 40
    assert Row.point_mass(3).nbytes == 8

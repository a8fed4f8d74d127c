"""Every order of operations in pools of at most five blocks, against the reference.

Three sequences (a prompt, one that branches off, one that goes on) are admitted, published, given
back logically and physically, shared and cut, and the cache is reset. Tests of orders take all
interleavings of a length, none left out and none merged. Tests of states merge orders that end in
the same state and go on until there is no new one, so they speak of orders of any length. After
each operation the hits, the evicted ids, all counts and all reference counts equal those of the
reference; after the last one everything is given back and nothing is lost.
"""

from __future__ import annotations

import pytest

from .exhaustive import Case, Enumeration
from .test_eviction import ShallowFirst, own

SIDES = ("share", "cut", "reset")
WHOLE = ("finish",)

ORDERS = [
    Case(2, 1, 6),
    Case(3, 2, 6),
    Case(5, 1, 5),
    Case(3, 1, 4, SIDES),
    Case(3, 1, 7, WHOLE),
    Case(3, 1, 6, WHOLE, "lrfu"),
    Case(4, 2, 6, WHOLE, own(ShallowFirst)),
]
LONG_ORDERS = [
    Case(2, 1, 9),
    Case(3, 2, 8),
    Case(4, 1, 7),
    Case(5, 2, 7),
    Case(3, 1, 6, SIDES),
    Case(3, 1, 9, WHOLE),
    Case(4, 1, 9, WHOLE),
    Case(5, 1, 8, WHOLE),
    Case(4, 1, 8, WHOLE, "lrfu"),
    Case(4, 1, 8, WHOLE, own(ShallowFirst)),
]
END = 100
STATES = [
    Case(2, 1, END, SIDES),
    Case(3, 2, END, ("reset",)),
    Case(3, 1, END, ("cut",)),
    Case(4, 1, END),
    Case(5, 2, END),
]
MORE_STATES = [
    Case(3, 1, END, SIDES),
    Case(4, 2, END, ("cut",)),
    Case(4, 1, END, ("share",)),
    Case(5, 1, END, ("reset",)),
    Case(5, 1, 8, SIDES),
]


def check_orders(case):
    done = Enumeration(case).all_orders()
    assert done["orders"] > 1000


def check_states(case):
    done = Enumeration(case).all_states()
    assert (done["depth"] < END) == (case.depth == END), "not all states were seen"


@pytest.mark.parametrize("case", ORDERS, ids=str)
def test_every_order_of_operations(case):
    check_orders(case)


@pytest.mark.parametrize("case", STATES, ids=str)
def test_every_operation_in_every_state_there_is(case):
    check_states(case)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", LONG_ORDERS, ids=str)
def test_every_long_order_of_operations(case):
    check_orders(case)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", MORE_STATES, ids=str)
def test_every_operation_in_every_state_of_richer_worlds(case):
    check_states(case)

"""The log: nobody can fill a disk with it."""

import logging

import pytest

from serve.gateway.log import MOST, FewLines
from tests.gateways import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def said(clock):
    """What comes through of one logger."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    handler.addFilter(FewLines(clock))
    logger = logging.getLogger("tests.few_lines")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def complain(times):
    for number in range(times):
        logging.getLogger("tests.few_lines").warning("no room for %d", number)


def test_what_is_said_again_and_again_is_said_a_few_times_a_minute(said, clock):
    complain(1000)
    assert len(said) == MOST
    clock.now_s += 59.0
    complain(1)
    assert len(said) == MOST
    clock.now_s += 1.0
    complain(2)
    assert said[MOST:] == [f"no room for 0 (and {1001 - MOST} more before)", "no room for 1"]


def test_other_things_are_said_meanwhile(said):
    complain(1000)
    logging.getLogger("tests.few_lines").error("something else")
    assert said[-1] == "something else"

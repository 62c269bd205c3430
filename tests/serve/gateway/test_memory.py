"""Large requests leave nothing behind."""

import weakref

from serve.gateway import memory
from tests.gateways import message, until


class Held:
    pass


def test_what_refers_to_itself_goes():
    held = Held()
    held.itself = held
    seen = weakref.ref(held)
    del held
    memory.give_back()
    assert seen() is None


def test_memory_is_given_back_after_large_requests_alone(running, monkeypatch):
    given = []
    monkeypatch.setattr(memory, "give_back", lambda: given.append(running.door.admission.bytes))
    running.call()(message(samples=2**18))
    until(lambda: given)
    until(lambda: not running.door.admission.untidy)
    assert given[-1] == 0
    given.clear()
    assert running.infer("[" * 2**21)[0] == 400
    until(lambda: given)
    until(lambda: not running.door.admission.untidy)
    given.clear()
    running.call()(message())
    assert not running.door.admission.untidy

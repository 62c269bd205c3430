"""How long the loop was at one thing, and its sign of life."""

import asyncio
import re
import time

from serve.gateway.background import LoopWatch
from serve.wire.alive import age_s
from serve.wire.folder import gateway_alive
from tests.gateways import until


def test_the_longest_turn_is_told_for_a_minute(tmp_path, monkeypatch):
    monkeypatch.setattr("serve.gateway.background.TICKS", 1)
    watch = LoopWatch(tmp_path / "alive")

    async def at_one_thing(seconds):
        await asyncio.sleep(0.1)
        time.sleep(seconds)
        await asyncio.sleep(0.1)

    async def watched():
        watch.start()
        await at_one_thing(0.4)
        seen = watch.longest_s
        await at_one_thing(0.2)
        still = watch.longest_s
        await watch.close()
        return seen, still

    seen, still = asyncio.run(watched())
    assert seen >= 0.3 and still >= seen
    assert age_s(tmp_path / "alive") < 60.0


def test_the_page_tells_it_and_the_file_says_that_the_loop_goes_on(running):
    async def at_one_thing():
        time.sleep(0.3)

    running.run(at_one_thing())
    found = r"earshot_gateway_longest_turn_seconds (0\.[2-9]|[1-9])"
    until(lambda: re.search(found, running.page()))
    assert "earshot_gateway_waiting_turns 0.0" in running.page()
    assert age_s(gateway_alive(running.folder)) < 60.0

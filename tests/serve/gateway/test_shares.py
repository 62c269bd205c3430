"""What one of the gateway's processes may have."""

import dataclasses

from serve.contract.config import Config
from serve.contract.keys import Key, hash_of
from serve.contract.server_config import GatewayConfig, LiveConfig, ServerConfig
from serve.gateway.callers import Callers
from serve.gateway.run import share_of

CONFIG = Config(
    server=ServerConfig(max_inflight=9, max_inflight_mb=1024), live=LiveConfig(max_streams=64)
)


def shared(processes):
    return dataclasses.replace(CONFIG, gateway=GatewayConfig(processes=processes))


def test_one_alone_may_have_everything():
    assert share_of(CONFIG) == CONFIG


def test_limits_are_shared_and_rounded_up():
    share = share_of(shared(2))
    assert (share.server.max_inflight, share.server.max_inflight_mb) == (5, 512)
    assert share.live.max_streams == 32


def test_so_are_those_of_keys(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.a]\nsha256 = "{hash_of("secret")}"\nrequests_per_minute = 60\n')
    config = shared(3)
    server = dataclasses.replace(config.server, keys_file=str(path))
    caller = Callers(dataclasses.replace(config, server=server)).identify("Bearer secret")
    assert caller.key == Key(hash_of("secret"), 20)

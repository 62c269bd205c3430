"""What one of the gateway's processes may have of what all may have together."""

import dataclasses
import math

from serve.contract.config import Config


def share_of(config: Config) -> Config:
    """A configuration whose limits are those of one of its gateway's processes, rounded up."""
    processes, server, live = config.gateway.processes, config.server, config.live
    return dataclasses.replace(
        config,
        server=dataclasses.replace(
            server,
            max_inflight=math.ceil(server.max_inflight / processes),
            max_inflight_mb=math.ceil(server.max_inflight_mb / processes),
        ),
        live=dataclasses.replace(live, max_streams=math.ceil(live.max_streams / processes)),
    )

"""Open an engine folder as a warmed-up transcriber."""

from collections.abc import Callable

import numpy as np

from serve.contract.config import Config, RuntimeConfig
from serve.contract.engine import Engine, checked_meanwhile
from serve.contract.errors import ConfigError
from serve.contract.messages import Request
from serve.runtime.loader import open_runtime
from serve.runtime.protocol import Capabilities, Runtime
from serve.speech.features import SAMPLE_RATE
from serve.transcriber.loop import Transcriber


def open_transcriber(
    config: Config,
    engine_path: str | None = None,
    start: Callable[[Engine, RuntimeConfig], Runtime] = open_runtime,
) -> Transcriber:
    """Open an engine, start its runtime and transcribe a second of noise to warm everything up.

    Args:
        config: the server's configuration.
        engine_path: the engine's folder; None uses `config.engine`.
        start: starts the runtime.

    Raises:
        EarshotError: a step failed; all opened resources are closed again.
    """
    owner: Runtime | Transcriber | None = None  # its `close` closes all opened resources
    try:
        with checked_meanwhile(engine_path or config.engine) as engine:
            owner = runtime = start(engine, config.runtime)
            _check_short_encoder(config, runtime.capabilities)
            owner = transcriber = Transcriber(engine, runtime, config.transcriber)
            transcriber.transcribe(_warm_up_request(engine, runtime.capabilities))
    except BaseException:  # Ctrl-C as well
        if owner is not None:
            owner.close()
        raise
    return transcriber


def _check_short_encoder(config: Config, capabilities: Capabilities) -> None:
    if capabilities.short_windows:
        return
    for table in ("live", "transcriber"):
        if getattr(config, table).short_encoder == "on":
            raise ConfigError(
                f'{table}.short_encoder = "on", but the runtime {capabilities.runtime} on '
                f"{capabilities.device} encodes whole windows; expected auto, off"
            )


def _warm_up_request(engine: Engine, capabilities: Capabilities) -> Request:
    noise = np.random.default_rng(0).standard_normal(SAMPLE_RATE) * 1e-3
    languages = engine.manifest.tokenizer.languages
    language = None if capabilities.detect_language else next(iter(languages), None)
    return Request(
        audio=noise.astype(np.float32),
        sample_rate=SAMPLE_RATE,
        language=language,
        timestamps=capabilities.timestamps,
        vad=False,  # VAD would skip the noise
    )

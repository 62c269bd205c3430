"""Opening a transcriber: what is warmed up, and what is left when opening fails."""

import contextlib
import dataclasses

import pytest

import serve.transcriber.open
from serve.contract.config import Config, RuntimeConfig
from serve.contract.errors import ConfigError, EarshotError, EngineError
from serve.contract.server_config import LiveConfig
from serve.transcriber.open import open_transcriber
from tests.fakes import CAPABILITIES, Echo, FakeRuntime
from tests.harness import TranscriberTests

CONFIG = Config(engine="engines/of-the-config", runtime=RuntimeConfig(slots=3))


class TestOpening(TranscriberTests):
    """What `open_transcriber` leaves behind, well or ill."""

    @pytest.fixture
    def paths(self, engine, monkeypatch):
        """Paths of the engines that are opened; each is the fake one."""
        paths = []

        def checked_meanwhile(path):
            paths.append(path)
            return contextlib.nullcontext(engine)

        monkeypatch.setattr(serve.transcriber.open, "checked_meanwhile", checked_meanwhile)
        return paths

    @pytest.fixture
    def product(self, paths, engine):
        """A fake runtime with the given script, and a function that opens a transcriber on it."""

        def product(script, defaults=CONFIG.transcriber, **lacks):
            runtime = FakeRuntime(script, dataclasses.replace(CAPABILITIES, **lacks))
            config = dataclasses.replace(CONFIG, transcriber=defaults)

            def start(found, settings):
                assert (found, settings) == (engine, config.runtime)
                return runtime

            return runtime, lambda *path, **how: open_transcriber(config, *path, start=start, **how)

        return product

    def test_the_engine_is_that_of_the_config_unless_another_is_named(self, product, echo, paths):
        _, opened = product(echo)
        opened().close()
        opened("engines/other").close()
        assert paths == ["engines/of-the-config", "engines/other"]

    def test_live_text_cannot_have_a_shorter_encoder_than_the_runtime(
        self, paths, engine, monkeypatch
    ):
        runtime = FakeRuntime(None, dataclasses.replace(CAPABILITIES, short_windows=False))
        config = dataclasses.replace(CONFIG, live=LiveConfig(short_encoder="on"))
        with pytest.raises(ConfigError, match=r'live.short_encoder = "on", but the runtime'):
            open_transcriber(config, start=lambda *_: runtime)
        assert runtime.closed

    def test_a_runtime_is_closed_whose_engine_turns_out_to_be_damaged(
        self, product, echo, monkeypatch, engine
    ):
        runtime, opened = product(echo)

        @contextlib.contextmanager
        def damaged(path):
            yield engine
            raise EngineError(f"{path} fails its SHA-256")

        monkeypatch.setattr(serve.transcriber.open, "checked_meanwhile", damaged)
        with pytest.raises(EngineError, match="fails its SHA-256"):
            opened()
        assert runtime.closed

    @pytest.mark.parametrize("lacks", [{}, {"detect_language": False, "timestamps": False}])
    def test_opening_ends_with_a_warm_up(self, product, echo, lacks):
        runtime, opened = product(echo, **lacks)
        with opened() as transcriber:
            (job,) = runtime.jobs
            assert transcriber.healthy
            assert transcriber.stats().audio_s == 1.0
        assert job.options.timestamps == (not lacks)
        assert runtime.closed

    def test_a_failed_warm_up_closes_everything(self, product, tokenizer):
        runtime, opened = product(Echo(tokenizer, error=EarshotError("cold")))
        with pytest.raises(EarshotError, match="cold"):
            opened()
        assert runtime.closed

    def test_a_wrong_configuration_closes_the_runtime(self, product, echo):
        runtime, opened = product(echo, sampling=False)
        with pytest.raises(ConfigError, match=r"temperatures.*cannot sample; expected \[0.0\]"):
            opened()
        assert runtime.closed

"""Open the engine in the model's process."""

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path

from serve.contract.errors import EarshotError
from serve.contract.fields import MAX_BEAMS
from serve.contract.messages import (
    AudioFile,
    OnEvent,
    Priority,
    RequestFailed,
    RequestFinished,
    RequestHandle,
    TranscriberEvent,
)
from serve.transcriber.loop import Transcriber
from serve.transcriber.request_tracker import Stats
from serve.triton.cancellation import CancellationRegistry
from serve.triton.metrics import MetricFamily, Publisher
from serve.wire import folder as names
from serve.wire import tensors, uploads

Inputs = Mapping[str, tensors.Tensor]


class EngineBackend:
    """The transcriber of the model, and its running requests by key.

    Args:
        transcriber: the transcriber; `close` closes it.
        drain_s: seconds that `close` waits for accepted requests.
        folder: the folder of the run; if the device fails, its file `FAILURE` gets the reason.
        metric_family: Triton's class of metrics.
    """

    def __init__(
        self, transcriber: Transcriber, drain_s: float, folder: Path, metric_family: MetricFamily
    ) -> None:
        self._transcriber = transcriber
        self._drain_s = drain_s
        self._folder = folder
        slots = transcriber.capabilities.max_windows
        self._publisher = Publisher(self._stats, metric_family, _engine_labels(transcriber), slots)
        self._registry = CancellationRegistry()

    def start(
        self, inputs: Inputs, on_event: OnEvent, key: str | None = None, priority: Priority = "file"
    ) -> RequestHandle:
        """Submit a request.

        Args:
            inputs: the request's tensors.
            on_event: receives the events; see `Transcriber.submit`.
            key: the request's key for cancelling; see `serve.triton.cancellation`.
            priority: see `Transcriber.submit`.

        Raises:
            EarshotError: the request is wrong, or not accepted.
        """
        submit = functools.partial(self._submit, inputs, key, priority)
        return submit(on_event) if key is None else self._registry.submit(key, on_event, submit)

    def cancel(self, key: str) -> None:
        """End the request of this key, now or when it arrives; see `CancellationRegistry`."""
        self._registry.cancel(key)

    def close(self) -> None:
        """Drain and stop the transcriber."""
        self._publisher.close()
        self._transcriber.drain(self._drain_s)
        self._transcriber.close()

    def _stats(self) -> Stats:
        """Return the transcriber's statistics; report a failure of the device."""
        failure = self._folder / names.FAILURE
        if not self._transcriber.healthy and not failure.exists():
            failure.write_text("the device failed; see the log", encoding="utf-8")
        return self._transcriber.stats()

    def _submit(
        self, inputs: Inputs, key: str | None, priority: Priority, on_event: OnEvent
    ) -> RequestHandle:
        with contextlib.ExitStack() as stack:
            try:
                has_audio = bool({"AUDIO", "SAMPLES"} & inputs.keys())
                file = uploads.take(self._folder, key) if key and not has_audio else None
                if file is not None:
                    stack.callback(file.free_disk_space)
                    on_event = functools.partial(_release_at_end, file, on_event)
                request = tensors.request_from_inputs(inputs, file)
            except EarshotError:
                self._transcriber.reject()
                raise
            handle = self._transcriber.submit(request, on_event, priority)
            stack.pop_all()
        return handle


def _release_at_end(file: AudioFile, on_event: OnEvent, event: TranscriberEvent) -> None:
    if isinstance(event, RequestFinished | RequestFailed):
        file.free_disk_space()
    on_event(event)


def _engine_labels(transcriber: Transcriber) -> dict[str, str]:
    """Return the features of the engine and its runtime, as labels of a metric."""
    capabilities = transcriber.capabilities
    return {
        "languages": ",".join(sorted(transcriber.tokenizer.languages)),
        "detects_language": str(capabilities.detect_language).lower(),
        "words": str(capabilities.words).lower(),
        "beams": str(min(capabilities.beam_width, MAX_BEAMS)),
    }

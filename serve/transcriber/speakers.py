"""Who says what: a request's audio is heard once more for its speakers, beside the device.

An engine's process has one thread for it and opens the networks with the first request that asks.
The audio is decoded anew, block by block, so that hours of it never lie in memory.
"""

import bisect
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from serve.contract.errors import AudioError, EarshotError, RequestError
from serve.contract.messages import Samples, Segment, Word
from serve.speakers.diarize import REFERENCE_S, Diarizer, Known, Turn, open_diarizer
from serve.speakers.words import label
from serve.speech import audio
from serve.speech.meter import Limits
from serve.transcriber.active import ActiveRequest
from serve.transcriber.guard import guarded

T = TypeVar("T")
Blocks = Callable[[], Generator[Samples, None, None]]


class SpeakerWorker:
    """Tells who speaks in requests, one after another. Thread-safe.

    Args:
        device: where the networks run, such as "cpu" or "cuda:0".
        on_turns: called on the worker with who speaks when in a request; must not block.
        on_error: called on the worker if that cannot be told; must not block.
    """

    def __init__(
        self,
        device: str,
        on_turns: Callable[[ActiveRequest, tuple[Turn, ...]], None],
        on_error: Callable[[ActiveRequest, EarshotError], None],
    ) -> None:
        self._device = device
        self._on_turns, self._on_error = on_turns, on_error
        self._worker = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="earshot-speakers"
        )

    def add(self, active: ActiveRequest, blocks: Blocks) -> None:
        """Hear a request's audio when its turn comes; returns at once."""
        self._worker.submit(self._tell, active, blocks)

    def close(self) -> None:
        """Begin no more; what is under way ends with its next block."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _tell(self, active: ActiveRequest, blocks: Blocks) -> None:
        if active.ended:
            return
        work = functools.partial(self._turns, active, blocks)
        turns = guarded(f"telling the speakers of request {active.id} apart", work)
        if isinstance(turns, EarshotError):
            self._on_error(active, turns)
        else:
            self._on_turns(active, turns)

    def _turns(self, active: ActiveRequest, blocks: Blocks) -> tuple[Turn, ...]:
        speakers = active.plan.speakers
        assert speakers is not None
        known = [Known(name, _reference(name, file)) for name, file in speakers.known]
        with contextlib.closing(blocks()) as samples:
            return self._diarizer.diarize(
                samples,
                num_speakers=speakers.num,
                min_speakers=speakers.least,
                max_speakers=speakers.most,
                known=known,
            )

    @functools.cached_property
    def _diarizer(self) -> Diarizer:
        return open_diarizer(self._device)


def _reference(name: str, file: bytes) -> Samples:
    """The samples of a known speaker's reference.

    Raises:
        RequestError: it is no audio, or too long.
    """
    try:
        return audio.whole(audio.decode(file, Limits(REFERENCE_S[1])))
    except AudioError as error:
        raise RequestError(f"the reference of {name}: {error}") from error


def by_speaker(
    segments: Sequence[Segment], turns: Sequence[Turn], decode: Callable[[Sequence[int]], str]
) -> Iterator[Segment]:
    """Segments of one speaker each: they break where another one begins, between words.

    Args:
        segments: in order, with words.
        turns: who speaks when.
        decode: gives the text of tokens.
    """
    speakers = iter(label([word for one in segments for word in one.words or ()], turns))
    for segment in segments:
        words = [(word, next(speakers)) for word in segment.words or ()]
        parts = [
            ([word for word, _ in pairs], speaker)
            for speaker, pairs in itertools.groupby(words, key=lambda pair: pair[1])
        ]
        if len(parts) > 1:
            yield from _broken(segment, parts, decode)
        else:
            yield dataclasses.replace(segment, speaker=parts[0][1] if parts else None)


def _broken(
    segment: Segment,
    parts: Sequence[tuple[list[Word], str | None]],
    decode: Callable[[Sequence[int]], str],
) -> Iterator[Segment]:
    """A segment for each part of another's words."""
    texts = ["".join(word.word for word in words) for words, _ in parts]
    tokens = _shared(segment.tokens, texts, lambda token: decode([token]))
    logprobs = _shared(segment.token_logprobs or (), texts, lambda piece: piece.token)
    for number, (words, speaker) in enumerate(parts):
        yield dataclasses.replace(
            segment,
            start=words[0].start if number else segment.start,
            end=words[-1].end if number + 1 < len(parts) else segment.end,
            text=texts[number],
            words=tuple(words),
            tokens=tokens[number],
            token_logprobs=None if segment.token_logprobs is None else logprobs[number],
            speaker=speaker,
        )


def _shared(
    items: Sequence[T], texts: Sequence[str], text_of: Callable[[T], str]
) -> list[tuple[T, ...]]:
    """Tokens, or what stands for one, shared out among the texts that they make in turn."""
    ends = list(itertools.accumulate(map(len, texts)))[:-1]
    parts: list[list[T]] = [[] for _ in texts]
    length = 0
    for item in items:
        parts[bisect.bisect_right(ends, length)].append(item)
        length += len(text_of(item))
    return [tuple(part) for part in parts]

"""Live streams on the runtime: growing utterances, decoded when a gateway would ask for it.

Each stream speaks and pauses as its script says, whatever the runtime makes of it. While it speaks,
its utterance is decoded at the pace of `serve.gateway.live`, with the tokens before as a draft, and
once more in each pause. Words become final as they do there: by the second decoding that has them,
by the first one with enough audio behind them, or, where the pause comes before that, when it is
long enough to end the utterance. Lengths are forced, and so is the share of a draft that is right.
What is measured is how long words wait.
"""

import collections
import concurrent.futures
import dataclasses
import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from eval.bench.load import NoiseWindows
from eval.bench.table import percentiles_ms
from serve.contract.errors import EarshotError
from serve.contract.fields import ShortEncoder
from serve.gateway.live.pace import Pace
from serve.gateway.live.utterance import SURE_S
from serve.runtime.protocol import DecodingOptions, Event, Job, Runtime
from serve.speech.words import handovers
from serve.transcriber.spans import encoder_frames

WARM_S = 2.0  # words said before this are not counted
WORDS_PER_S, TOKENS_PER_S = 2.5, 4.3  # 4.3 a second are MLPerf's 128 in 30 s
RIGHT = 0.5  # of a draft's tokens; on the demo's clips 0.53 were
PAUSE_S, SILENCE_S = 0.2, 0.5  # quiet that is decoded at once, and that ends an utterance
SPEECH_S, QUIET_S = (2.0, 10.0), (0.6, 1.4)  # an utterance, and the quiet behind it

_EDGE_S = 0.2  # at the end of audio, a word that is not heard rightly yet
_LEAST_S = 0.2  # of new audio in a decoding
_GRACE_S = 4.0  # that the last words are waited for
_FRAMES_PER_S = 50
_NAP_S = 0.0005


@dataclasses.dataclass
class Word:
    """A word that is not final."""

    said_s: float  # when it ends
    decodings: int = 0  # that have it


class Utterance:
    """Speech of somebody between two pauses.

    Args:
        begins_s: when.
        speech_s: for how long.
    """

    def __init__(self, begins_s: float, speech_s: float) -> None:
        self.begins_s = begins_s
        self.speech_s = speech_s
        self.heard_s = 0.0
        """So much of it was in the latest decoding."""
        self.tokens: tuple[int, ...] = ()
        """Of that."""
        count = max(1, int(speech_s * WORDS_PER_S))
        self.words = [Word(begins_s + (i + 1) / WORDS_PER_S) for i in range(count)]

    @property
    def over_s(self) -> float:
        """Return when the pause has been long enough."""
        return self.begins_s + self.speech_s + SILENCE_S

    @property
    def whole(self) -> bool:
        """Return whether all of it was decoded."""
        return self.heard_s >= self.speech_s

    def due_s(self, pace: Pace) -> float:
        """Return when it is to be decoded next."""
        pause_s = self.begins_s + self.speech_s + PAUSE_S
        return min(pause_s, max(pace.due_s, self.begins_s + self.heard_s + _LEAST_S))

    def audio_s(self, now_s: float) -> float:
        """Return how much of it there is to be decoded; all of it only in the pause."""
        said_s = now_s - self.begins_s
        return said_s if said_s >= self.speech_s + PAUSE_S else min(said_s, self.speech_s - 1e-9)

    def decoded(self, heard_s: float, now_s: float) -> Iterator[tuple[Word, float]]:
        """Yield the words that become final by a decoding, each with when that is."""
        self.heard_s, waiting = heard_s, list[Word]()
        for word in self.words:
            behind_s = self.begins_s + heard_s - word.said_s
            word.decodings += self.whole or behind_s >= _EDGE_S
            if word.decodings >= 2 or behind_s >= SURE_S:
                yield word, now_s
            elif self.whole:
                yield word, max(now_s, self.over_s)
            else:
                waiting.append(word)
        self.words = waiting


def script(rng: random.Random, until_s: float) -> Iterator[Utterance]:
    """Yield a stream's utterances; at 0 it is in the middle of the first."""
    speech_s = rng.uniform(*SPEECH_S)
    begins_s = -rng.uniform(0, speech_s)
    while begins_s < until_s:
        yield Utterance(begins_s, speech_s)
        begins_s += speech_s + rng.uniform(*QUIET_S)
        speech_s = rng.uniform(*SPEECH_S)


@dataclasses.dataclass(eq=False)
class Stream:
    """Somebody who speaks."""

    index: int
    pace: Pace
    utterances: collections.deque[Utterance]  # the first one is decoded

    def due_s(self) -> float:
        """Return when it is to be decoded next."""
        return self.utterances[0].due_s(self.pace) if self.utterances else float("inf")


@dataclasses.dataclass(frozen=True)
class Update:
    """A decoding under way."""

    stream: Stream
    due_s: float
    audio_s: float
    tokens: list[int] = dataclasses.field(default_factory=list)  # so far


@dataclasses.dataclass(frozen=True)
class LiveLoad:
    """Figures of so many streams."""

    streams: int
    latency_s: list[float]  # of each word; where it did not become final, as long as was waited
    unfinished: int  # words that did not become final
    updates_per_s: float
    update_s: list[float]  # from due to done

    @property
    def figures(self) -> dict[str, float]:
        """Return the same as numbers by name."""
        updates = {f"update_{name}": ms for name, ms in percentiles_ms(self.update_s).items()}
        return {
            "streams": self.streams,
            "words": len(self.latency_s),
            "unfinished": self.unfinished,
            "updates_per_s": self.updates_per_s,
            **percentiles_ms(self.latency_s),
            **updates,
        }


class Streams:
    """Streams that speak.

    Args:
        runtime: idle; nobody else uses it meanwhile.
        windows: of noise; their log-mel is computed anew for each update, as in serving.
        count: how many streams.
        update_s: `live.update_s`.
        seconds: whose words are counted.
        short: how much of their audio is encoded, as `LiveConfig.short_encoder` says.
    """

    def __init__(
        self,
        runtime: Runtime,
        windows: NoiseWindows,
        count: int,
        update_s: float,
        seconds: float,
        short: ShortEncoder,
    ) -> None:
        self._runtime = runtime
        self._windows = windows
        self._seconds = seconds
        self._short = short
        self._end_s = WARM_S + seconds
        self._streams = [self._stream(i, update_s) for i in range(count)]
        self._idle = list[tuple[float, int]]()
        """When each stream without an update under way is due, the soonest first, and its index."""
        self._under_way: dict[int, Update] = {}  # by its job
        self._timers = concurrent.futures.ThreadPoolExecutor(2)  # as many as a transcriber has
        self._timing = dict[concurrent.futures.Future[Any], Update]()
        self._began = 0.0
        self._latency_s: list[float] = []
        self._update_s: list[float] = []

    def _stream(self, index: int, update_s: float) -> Stream:
        rng, pace = random.Random(index), Pace(update_s)
        pace.speech(-rng.uniform(0, update_s))
        return Stream(index, pace, collections.deque(script(rng, self._end_s)))

    def run(self) -> LiveLoad:
        """Let them speak; the runtime is empty afterwards.

        Raises:
            EarshotError: an update failed, or no word was said.
        """
        self._began = time.perf_counter()
        for stream in self._streams:
            self._wait(stream)
        while (now_s := self._now_s()) < self._end_s or (
            any(self._waiting()) and now_s < self._end_s + _GRACE_S
        ):
            self._hand_over(now_s)
            self._poll(self._note)
            self._end_timed(self._now_s())
        now_s = self._now_s()
        waiting = [now_s - word.said_s for word in self._waiting()]
        self._give_up()
        latency_s = self._latency_s + waiting
        if not latency_s or not self._update_s:
            raise EarshotError(
                f"{len(self._streams)} streams said nothing in {self._seconds:g} s; expected "
                "words: raise --seconds or --streams"
            )
        rate = len(self._update_s) / (now_s - WARM_S)
        return LiveLoad(len(self._streams), latency_s, len(waiting), rate, self._update_s)

    def _now_s(self) -> float:
        return time.perf_counter() - self._began

    def _waiting(self) -> Iterator[Word]:
        """Yield words that count and are not final."""
        for stream in self._streams:
            for utterance in stream.utterances:
                yield from filter(self._counts, utterance.words)

    def _counts(self, word: Word) -> bool:
        return WARM_S <= word.said_s < self._end_s

    def _poll(self, note: Callable[[Event], None]) -> None:
        if not self._under_way:
            time.sleep(_NAP_S)
        for event in self._runtime.poll(_NAP_S):
            note(event)

    def _wait(self, stream: Stream) -> None:
        heapq.heappush(self._idle, (stream.due_s(), stream.index))

    def _hand_over(self, now_s: float) -> None:
        """Begin the updates that are due, longest first."""
        while self._idle and self._idle[0][0] <= now_s:
            _, index = heapq.heappop(self._idle)
            self._decode(self._streams[index], now_s)

    def _decode(self, stream: Stream, now_s: float) -> None:
        """Decode what a stream has said by now."""
        utterance = stream.utterances[0]
        update = Update(stream, stream.due_s(), utterance.audio_s(now_s))
        right = round(RIGHT * len(utterance.tokens))
        wrong = (token - 1 if token else 1 for token in utterance.tokens[right:])
        said_s = min(update.audio_s, utterance.speech_s)
        row = stream.index % self._windows.batch  # of the noise that they make
        job = Job(
            self._windows.new_id(),
            self._windows.beginning(row, encoder_frames(update.audio_s, self._short)),
            self._windows.prompt,
            DecodingOptions(timestamps=False, max_tokens=max(2, round(said_s * TOKENS_PER_S))),
            draft=(*utterance.tokens[:right], *wrong),
            align_frames=max(1, round(update.audio_s * _FRAMES_PER_S)),
            urgent=True,
        )
        stream.pace.began(now_s)
        self._under_way[job.id] = update
        self._runtime.submit(job)

    def _note(self, event: Event) -> None:
        if event.error is not None:
            raise event.error
        self._under_way[event.job_id].tokens.extend(event.tokens)
        if event.finished is None:
            return
        update = self._under_way.pop(event.job_id)
        if event.alignment is None or event.alignment.matrix is None:
            self._end(update, self._now_s())
        else:
            self._timing[self._timers.submit(handovers, event.alignment.matrix)] = update

    def _end_timed(self, now_s: float) -> None:
        """End the updates whose words have their times."""
        for future in [future for future in self._timing if future.done()]:
            future.result()
            self._end(self._timing.pop(future), now_s)

    def _end(self, update: Update, now_s: float) -> None:
        stream = update.stream
        utterance = stream.utterances[0]
        stream.pace.ended(now_s, len(self._streams))
        utterance.tokens = tuple(update.tokens)
        for word, final_s in utterance.decoded(update.audio_s, now_s):
            if self._counts(word):
                self._latency_s.append(final_s - word.said_s)
        if update.due_s >= WARM_S:
            self._update_s.append(now_s - update.due_s)
        if utterance.whole:
            stream.utterances.popleft()
            for following in itertools.islice(stream.utterances, 1):
                stream.pace.speech(following.begins_s)
        self._wait(stream)

    def _give_up(self) -> None:
        for job_id in list(self._under_way):
            self._runtime.cancel(job_id)
        while self._under_way:
            self._poll(self._forget)
        self._timers.shutdown()

    def _forget(self, event: Event) -> None:
        if event.finished is not None:
            self._under_way.pop(event.job_id, None)


class Search:
    """Finds the largest number that is held, to a tenth or as near as so many tries come.

    Args:
        first: the number to begin with.
        tries: at most.
    """

    def __init__(self, first: int, tries: int) -> None:
        self._first = first
        self._tries = tries
        self.held = 0
        """The most that were; 0: none."""
        self._too_many = 0

    def counts(self) -> Iterator[int]:
        """Yield numbers to try; `note` is called before the next one is asked for."""
        count = self._first
        for _ in range(self._tries):
            yield count
            if self._too_many:
                if self._too_many - self.held <= max(1, self._too_many // 10):
                    return
                count = (self.held + self._too_many) // 2
            else:
                count = 3 * self.held // 2 + 1

    def note(self, count: int, held: bool) -> None:
        """Note what came of a number."""
        if held:
            self.held = count
        else:
            self._too_many = count

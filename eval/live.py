"""`python -m eval live`: stream recordings at the pace of speech, and measure the text.

Every stream plays its share of the recordings one after another, each in a separate session. The
same server tells the time of a word when it transcribes the whole recording without other load.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import selectors
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry

from build.clips import Clip
from eval.accuracy.normalize import DEFAULT, Normalize, normalizer
from eval.accuracy.passages import join_clips
from eval.accuracy.score import Counts, char_counts, in_common
from eval.config import HELD_S, EvaluationProduct
from eval.corpora.find import find_clips
from eval.record import Check, ReportSection, Result, Run, Say, Table
from eval.server import running
from serve.cli.live_client import Heard, converse, transcribe_live
from serve.contract.codec import to_json
from serve.contract.errors import ConfigError, EarshotError
from serve.contract.messages import Request, Samples, Transcript
from serve.contract.server_config import LiveConfig
from serve.gateway.live.events import Event
from serve.gateway.live.session import LiveSession
from serve.gateway.live.settings import SessionSettings
from serve.gateway.live.utterance import UpdateWindow
from serve.gateway.observe.metrics import LiveMetrics
from serve.speech.audio import decode
from serve.speech.meter import AudioLimits
from serve.speech.vad import VadModel
from serve.transcriber.loop import Transcriber
from serve.transcriber.open import open_transcriber
from serve.wire.client import TritonClient

T = TypeVar("T")
_CHANGED = "earshot_live_changed_words_total"
_WAIT_S = 60.0  # that a session may say nothing


@dataclasses.dataclass(frozen=True)
class StreamingSystem:
    """Ways to make text of whole recordings and of streams.

    Attributes:
        whole: transcribes a recording.
        play: streams audio as it is spoken; see `serve.cli.live_client.transcribe_live`.
        changed: counts the words of hypotheses so far that did not stay; raises an EarshotError if
            a process of the server has ended.
        loop: makes the event loop in which streams are played; None: asyncio's own.
    """

    whole: Callable[[Request], Transcript]
    play: Callable[[Iterable[Samples], dict[str, Any]], AsyncIterator[Heard]]
    changed: Callable[[], float]
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None


@contextlib.contextmanager
def open_system(config: EvaluationProduct, decode_s: float) -> Iterator[StreamingSystem]:
    """Open a system for the length of a `with` block.

    Args:
        config: the product.
        decode_s: 0 starts a real server; else sessions are simulated in this process, and every
            decoding takes so long by their clock.

    Raises:
        EarshotError: it does not start.
    """
    if decode_s:
        with open_transcriber(config) as transcriber:
            simulated = Simulated(transcriber, config.live, decode_s)
            yield StreamingSystem(
                transcriber.transcribe, simulated.play, simulated.changed, JumpingLoop
            )
        return
    timeout_s = config.transcriber.request_timeout_s
    with running(config) as server, TritonClient(server.grpc, timeout_s) as client:
        yield StreamingSystem(
            lambda request: client.start(request).result(),
            functools.partial(transcribe_live, f"ws://{server.http}", wait_s=_WAIT_S),
            lambda: server.counters(_CHANGED)[_CHANGED],
        )


class Simulated:
    """Sessions by a clock that stands while anything works and jumps to when there is more to do.

    So streams run as fast as they are decoded, and the result depends neither on the machine nor on
    its other work. Streams share one decoder, which makes one text after another.

    Args:
        transcriber: decodes.
        config: how live text is made.
        decode_s: the seconds that each decoding takes.
    """

    def __init__(self, transcriber: Transcriber, config: LiveConfig, decode_s: float) -> None:
        self._transcriber = transcriber
        self._config = config
        self._decode_s = decode_s
        self._registry = CollectorRegistry()
        self._metrics = LiveMetrics(self._registry, ())
        self._decoder = asyncio.Lock()
        self._streams = 0  # that are played

    async def play(
        self, blocks: Iterable[Samples], transcription: dict[str, Any]
    ) -> AsyncIterator[Heard]:
        """Stream through a session in this process."""
        wire = _Wire(self)
        work = asyncio.create_task(wire.work())
        self._streams += 1
        try:
            async for news in converse(wire, blocks, transcription, pace=1.0, wait_s=_WAIT_S):
                yield news
        finally:
            self._streams -= 1
            work.cancel()
            await asyncio.wait((work,))

    def changed(self) -> float:
        """Count the words that did not stay."""
        return self._registry.get_sample_value(_CHANGED) or 0.0

    def session(self, send: "asyncio.Queue[Event | Exception]") -> LiveSession:
        """Make a session that puts its events into a queue."""

        async def transcribe(_model: str | None, window: UpdateWindow) -> Transcript:
            async with self._decoder:
                request = window.request(self._config, np.concatenate(window.audio))
                transcript = self._transcriber.transcribe(request)
                await asyncio.sleep(self._decode_s)
            return transcript

        return LiveSession(
            self._config,
            str,
            transcribe,
            send.put,
            lambda _: None,
            VadModel(),
            InlineExecutor(),
            self._metrics,
            lambda: self._streams,
            SessionSettings(),
            [],
        )


class _Wire:
    """Stands for the connection to a session in this process."""

    def __init__(self, system: Simulated) -> None:
        self._events = asyncio.Queue[Event | Exception]()
        self._session = system.session(self._events)

    async def work(self) -> None:
        try:
            await self._session.start()
            await self._session.work()
        except Exception as error:  # noqa: BLE001 - raised by `recv`
            await self._events.put(error)

    async def send(self, message: str) -> None:
        await self._session.handle(message)

    async def recv(self) -> str:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return to_json(event)


class InlineExecutor(Executor):
    """Runs work at once, in the thread that submits it: a clock that jumps waits for no thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Return the result as a future that is done."""
        future = Future[T]()
        future.set_result(fn(*args, **kwargs))
        return future


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock on which only waiting takes time; it never really waits."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.waited_s


class _Jumps(selectors.SelectSelector):
    waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.waited_s += max(0.0, timeout or 0.0)
        return super().select(None if timeout is None else 0.0)


TimedWord = tuple[str, float]
"""A word, and the second at which it became final or at which it ends in the audio."""


def final_words(deltas: Iterable[tuple[float, str]]) -> list[TimedWord]:
    """Return the words of one utterance with the times at which they became final.

    A word counts as there with its last letter; a mark may follow it later.

    Args:
        deltas: times (s of the stream) and texts, in order.
    """
    times, text = list[float](), ""
    for at_s, delta in deltas:
        text += delta
        times += [at_s] * len(delta)
    words, begin = list[TimedWord](), 0
    for word in text.split():
        begin = text.index(word, begin)
        letters = [i for i, character in enumerate(word) if character.isalnum()] or [0]
        words.append((word, times[begin + letters[-1]]))
        begin += len(word)
    return words


def latencies(
    final: Sequence[TimedWord],
    spoken: Sequence[TimedWord],
    normalize: Normalize,
    language: str | None,
) -> list[float]:
    """Measure the seconds from the end of each word in the audio to its final text.

    Words that were misheard tell nothing.
    """
    mine, theirs = ([normalize(word, language) for word, _ in words] for words in (final, spoken))
    return [final[i][1] - spoken[j][1] for i, j in in_common(mine, theirs)]


def passages(config: EvaluationProduct, join_s: float) -> list[Clip]:
    """Make passages of the clips of `eval.manifest` and `eval.half`, of the groups in turn.

    The clips of each speaker are joined. Where that or the place itself makes passages the other
    clips are left out, else they are taken as they are.

    Args:
        config: the product; only clips in `eval.gate_groups` are taken if there are any.
        join_s: the maximum length of joined clips; a passage lasts at least half of it.

    Raises:
        ConfigError: there are none.
        EarshotError: a clip cannot be read.
    """
    speech = config.eval.manifest
    drawn = find_clips(speech, half=config.eval.half).clips
    groups = {clip.group for clip in drawn} & set(config.eval.gate_groups)
    clips = [clip for clip in drawn if clip.text and (not groups or clip.group in groups)]
    if not clips:
        raise ConfigError(f"{speech} has no clip with text; expected some")
    alone = [clip for clip in clips if not clip.speaker]
    joined = join_clips([clip for clip in clips if clip.speaker], join_s, AudioLimits(join_s))
    long = [clip for clip in (*joined, *alone) if clip.duration_s >= join_s / 2] or clips
    by_group: dict[str, list[Clip]] = {}
    for clip in long:
        by_group.setdefault(clip.group, []).append(clip)
    turns = itertools.zip_longest(*(by_group[group] for group in sorted(by_group)))
    return [clip for turn in turns for clip in turn if clip is not None]


# ---------------------------------------------------------------- run


MAX_WORSE = 0.5  # points of CER that live text may have more than whole clips
_NORMALIZE = normalizer(DEFAULT)
_APART_S = 0.37  # between the beginnings of two streams
HEADER = (
    *("streams", "p50, s", "p95, s", "p99, s", "changed", "words", "known", "CER live"),
    *("CER whole", "from whole"),
)
_NOTE = (
    "Delays are from the end of a word in the audio to its final text, of words whose time is "
    "known. Changed: words of interim text that did not stay, per final word. From whole: the "
    "CER with the text of whole recordings as reference."
)


@dataclasses.dataclass(frozen=True)
class Level:
    """Figures of one number of streams."""

    streams: int
    audio_s: float
    words: int
    matched: int  # words with a known time
    p50_s: float
    p95_s: float
    p99_s: float
    changed_per_word: float  # words of hypotheses that did not stay; none of them was final
    cer: float  # %
    whole_cer: float  # % of the same recordings, each transcribed as a whole
    from_whole: float  # %: the errors of live text if a whole recording's were right
    failed: int  # utterances without text

    @property
    def checks(self) -> tuple[Check, ...]:
        """Return the checks of this number of streams."""
        late = f"95 of 100 words are final within {HELD_S:g} s"
        worse = f"CER at most {MAX_WORSE:g} points above that of whole recordings"
        points = self.cer - self.whole_cer
        of = f"with {self.streams} stream{'s' * (self.streams > 1)}"
        return (
            Check(f"every utterance has its text {of}", not self.failed, f"{self.failed} failed"),
            Check(f"{late} {of}", self.p95_s <= HELD_S, f"{self.p95_s:.2f} s"),
            Check(f"{worse} {of}", points <= MAX_WORSE, f"{points:+.2f} points"),
        )

    @property
    def row(self) -> list[str]:
        """Return the row of the report."""
        return [
            str(self.streams),
            *(f"{seconds:.2f}" for seconds in (self.p50_s, self.p95_s, self.p99_s)),
            f"{self.changed_per_word:.2f}",
            str(self.words),
            f"{100 * self.matched / max(1, self.words):.0f} %",
            *(f"{rate:.2f} %" for rate in (self.cer, self.whole_cer, self.from_whole)),
        ]


def live(
    run: Run, *, streams: tuple[int, ...], clips: int, join_s: float, simulate: float
) -> Result:
    """Measure live text of `passages`.

    Args:
        run: its record is kept anew with each number of streams.
        streams: how many at a time, one after another; the last must be good.
        clips: how many each of them plays.
        join_s: as in `passages`.
        simulate: `decode_s` of `open_system`.

    Raises:
        EarshotError: a server did not start, or has failed.
    """
    whole, levels = dict[str, Transcript](), list[Level]()
    played = passages(run.config, join_s)
    with open_system(run.config, simulate) as system:
        for count in streams:
            # Streams next to each other play different clips.
            shares = [
                [played[(index * 5 + i) % len(played)] for i in range(clips)]
                for index in range(count)
            ]
            levels.append(_level(system, shares, whole, run.say))
            run.say("; ".join(map(" ".join, zip(HEADER, levels[-1].row, strict=True))))
            table = Table(HEADER, [level.row for level in levels], note=_NOTE)
            result = Result(levels, levels[-1].checks, (ReportSection("Live text", [table]),))
            run.keep(result)
    return result


@dataclasses.dataclass(frozen=True)
class _Played:
    """One clip, streamed."""

    clip: Clip
    text: str
    words: list[TimedWord]  # that became final
    failed: int


def _level(
    system: StreamingSystem,
    shares: Sequence[Sequence[Clip]],
    whole: dict[str, Transcript],
    say: Say,
) -> Level:
    """Play all clips, and measure.

    Args:
        system: makes the text.
        shares: the clips of each stream.
        whole: the transcripts of whole clips by file; grows.
        say: gets lines of progress.

    Raises:
        EarshotError: the system has failed, or no word became final.
    """
    new = {clip.file: clip for share in shares for clip in share if clip.file not in whole}
    say(f"transcribing {len(new)} whole recordings …")
    for file, clip in new.items():
        request = Request(clip.path.read_bytes(), language=clip.language, word_timestamps=True)
        whole[file] = system.whole(request)
    all_s = max(sum(clip.duration_s for clip in share) for share in shares)
    say(f"{len(shares)} streams, {all_s:.0f} s at the pace of speech …")
    played = list[_Played]()

    async def stream(clips: Sequence[Clip], wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        for clip in clips:
            played.append(await _play(system, clip))
            say(f"  {len(played)} of {sum(map(len, shares))} clips; {clip.file}")

    async def streams() -> None:
        works = (stream(share, index * _APART_S) for index, share in enumerate(shares))
        await asyncio.gather(*works)

    changed = system.changed()
    with asyncio.Runner(loop_factory=system.loop) as runner:
        runner.run(streams())
    changed = system.changed() - changed
    times = [latency for one in played for latency in _latencies(one, whole[one.clip.file])]
    if not times:
        raise EarshotError("no word became final that is in the whole clips; expected most")
    words = sum(len(one.words) for one in played)
    p50_s, p95_s, p99_s = map(float, np.percentile(times, (50, 95, 99)))
    texts = [
        [
            _NORMALIZE(text, one.clip.language)
            for text in (one.clip.text, whole[one.clip.file].text, one.text)
        ]
        for one in played
    ]
    said, heard_whole, heard_live = zip(*texts, strict=True)
    return Level(
        streams=len(shares),
        audio_s=sum(one.clip.duration_s for one in played),
        words=words,
        matched=len(times),
        p50_s=p50_s,
        p95_s=p95_s,
        p99_s=p99_s,
        changed_per_word=changed / max(1, words),
        cer=_cer(said, heard_live),
        whole_cer=_cer(said, heard_whole),
        from_whole=_cer(heard_whole, heard_live),
        failed=sum(one.failed for one in played),
    )


def _cer(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """Return the errors in % of the characters."""
    total = sum(map(char_counts, references, hypotheses), Counts())
    return 100 * total.errors / total.length


def _latencies(played: _Played, whole: Transcript) -> list[float]:
    words = [word for segment in whole.segments for word in segment.words or ()]
    spoken = [(word.word.strip(), word.end) for word in words]
    return latencies(played.words, spoken, _NORMALIZE, played.clip.language)


async def _play(system: StreamingSystem, clip: Clip) -> _Played:
    blocks = decode(clip.path.read_bytes(), AudioLimits(clip.duration_s + 60))
    wanted = {} if clip.language is None else {"language": clip.language}
    deltas: dict[str, list[tuple[float, str]]] = {}
    transcripts, failed = list[str](), 0
    async for news in system.play(list(blocks), wanted):
        kind = news.event["type"].rpartition(".")[2]
        if kind == "delta":
            delta = news.at_s, news.event["delta"]
            deltas.setdefault(news.event["item_id"], []).append(delta)
        elif kind == "completed":
            transcripts.append(news.event["transcript"])
        failed += kind == "failed"
    words = [word for utterance in deltas.values() for word in final_words(utterance)]
    return _Played(clip, " ".join(transcripts), words, failed)

"""`python -m eval live`: stream recordings at the pace of speech, and measure the text.

Every stream plays its share of the recordings one after another, each in a separate session. The
reference times of words come from the same server, which transcribes the whole recording while it
is otherwise idle.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import math
import re
import selectors
import types
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import jiwer
import numpy as np
from prometheus_client import CollectorRegistry

from build.clips import Clip
from eval.accuracy.passages import join_clips, read_samples
from eval.accuracy.score import in_common
from eval.config import HELD_S, EvaluationProduct
from eval.corpora.find import find_clips
from eval.load import STALL_S, ClientProcesses, processes_for
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
from serve.speech.text import normalize_text
from serve.speech.vad import VadModel
from serve.transcriber.loop import Transcriber
from serve.transcriber.open import open_transcriber
from serve.wire.client import TritonClient

_CHANGED = "earshot_live_changed_words_total"
_WAIT_S = 60.0  # that a session may say nothing
_STREAMS_PER_PROCESS = 32  # each takes some 4 ms of a core in a second

Play = Callable[[Iterable[Samples], dict[str, Any]], AsyncIterator[Heard]]


@dataclasses.dataclass(frozen=True)
class StreamingSystem:
    """Ways to make text of whole recordings and of streams.

    Attributes:
        transcribe: transcribes a recording.
        play: streams audio as it is spoken; see `serve.cli.live_client.transcribe_live`.
        count_changed_words: counts the words of interim texts so far that did not stay; raises an
            EarshotError if a process of the server has ended.
        loop: makes the event loop in which streams are played; None: asyncio's own.
    """

    transcribe: Callable[[Request], Transcript]
    play: Play
    count_changed_words: Callable[[], float]
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
                transcriber.transcribe, simulated.play, simulated.count_changed_words, JumpingLoop
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
    """Sessions by a clock that stands during all work and jumps to the next thing to do.

    So streams run as fast as they are decoded, and the result depends neither on the machine nor on
    its other work. Streams share one decoder, which makes one text after another.

    Args:
        transcriber: decodes.
        config: how live text is made.
        decode_s: the seconds that each decoding takes.
    """

    def __init__(self, transcriber: Transcriber, config: LiveConfig, decode_s: float) -> None:
        self._transcriber, self._config, self._decode_s = transcriber, config, decode_s
        self._registry = CollectorRegistry()
        self._metrics = LiveMetrics(self._registry, ())
        self._decoder = asyncio.Lock()
        self._streams = 0  # that are played

    async def play(
        self, blocks: Iterable[Samples], transcription: dict[str, Any]
    ) -> AsyncIterator[Heard]:
        """Stream through a session in this process."""
        events = asyncio.Queue[Event | Exception]()
        session = LiveSession(
            self._config,
            str,
            self._transcribe,
            events.put,
            lambda _: None,
            VadModel(),
            InlineExecutor(),
            self._metrics,
            lambda: self._streams,
            SessionSettings(),
        )

        async def work() -> None:
            try:
                await session.work()
            except Exception as error:  # noqa: BLE001 - raised by `receive`
                await events.put(error)

        async def receive() -> str:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            return to_json(event)

        connection: Any = types.SimpleNamespace(send=session.handle, recv=receive)
        working = asyncio.create_task(work())
        self._streams += 1
        try:
            async for heard in converse(
                connection, blocks, transcription, pace=1.0, wait_s=_WAIT_S
            ):
                yield heard
        finally:
            self._streams -= 1
            working.cancel()
            await asyncio.wait((working,))

    async def _transcribe(self, window: UpdateWindow) -> Transcript:
        async with self._decoder:
            request = dataclasses.replace(window.options, audio=np.concatenate(window.audio))
            transcript = self._transcriber.transcribe(request)
            await asyncio.sleep(self._decode_s)
        return transcript

    def count_changed_words(self) -> float:
        """Count the words of interim texts that did not stay."""
        return self._registry.get_sample_value(_CHANGED) or 0.0


class InlineExecutor(Executor):
    """Runs work at once, in the thread that submits it: a clock that jumps waits for no thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Return the result as a future that is done."""
        future = Future[Any]()
        future.set_result(fn(*args, **kwargs))
        return future


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock on which only waiting takes time; it never really waits."""

    def __init__(self) -> None:
        self._selector_clock = _JumpingSelector()
        super().__init__(self._selector_clock)

    def time(self) -> float:
        return self._selector_clock.time_s


class _JumpingSelector(selectors.SelectSelector):
    time_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.time_s += max(0.0, timeout or 0.0)
        return super().select(None if timeout is None else 0.0)


TimedWord = tuple[str, float]
"""A word, and the second at which it became final or at which it ends in the audio."""


def final_words(deltas: Sequence[tuple[float, str]]) -> list[TimedWord]:
    """Return the words of one utterance with the times at which they became final.

    A word is final with its last letter; a punctuation mark may follow it later.

    Args:
        deltas: times (s of the stream) and texts, in order.
    """
    text = "".join(delta for _, delta in deltas)
    character_times = [time_s for time_s, delta in deltas for _ in delta]
    words = []
    for match in re.finditer(r"\S+", text):
        letters = [i for i in range(*match.span()) if text[i].isalnum()] or [match.start()]
        words.append((match[0], character_times[letters[-1]]))
    return words


def latencies(final: Sequence[TimedWord], whole: Transcript) -> list[float]:
    """Measure the seconds from the end of each word in the audio to its final text.

    Args:
        final: the words and the times at which they became final.
        whole: tells the ends of words; words that it does not have are left out.
    """
    spoken = [word for segment in whole.segments for word in segment.words or ()]
    live_words = [normalize_text(word) for word, _ in final]
    spoken_words = [normalize_text(word.word.strip()) for word in spoken]
    return [final[i][1] - spoken[j].end for i, j in in_common(live_words, spoken_words)]


def passages(config: EvaluationProduct, join_s: float) -> list[Clip]:
    """Make passages of the clips of `eval.manifest` and `eval.half`, the groups in turn.

    The clips of each speaker are joined. If there are passages, shorter clips are left out; if
    there are none, the clips are taken as they are.

    Args:
        config: the product; only clips in `eval.gate_groups` are taken if there are any.
        join_s: the maximum length of joined clips; a passage lasts at least half of it.

    Raises:
        ConfigError: there are no clips with text.
        EarshotError: a clip cannot be read.
    """
    speech = config.eval.manifest
    found = find_clips(speech, half=config.eval.half).clips
    groups = {clip.group for clip in found} & set(config.eval.gate_groups)
    clips = [clip for clip in found if clip.text and (not groups or clip.group in groups)]
    if not clips:
        raise ConfigError(f"{speech} has no clip with text; expected some")
    alone = [clip for clip in clips if not clip.speaker]
    joined = join_clips([clip for clip in clips if clip.speaker], join_s)
    long = [clip for clip in (*joined, *alone) if clip.duration_s >= join_s / 2] or clips
    long.sort(key=lambda clip: clip.group)
    by_group = [list(clips) for _, clips in itertools.groupby(long, lambda clip: clip.group)]
    rounds = itertools.zip_longest(*by_group)
    return [clip for clips in rounds for clip in clips if clip is not None]


# ---------------------------------------------------------------- run


MAX_WORSE = 0.5  # points of CER that live text may have more than whole clips
_APART_S = 0.37  # between the beginnings of two streams
HEADER = (
    *("streams", "p50, s", "p95, s", "p99, s", "changed", "words", "known"),
    *("CER live", "CER whole"),
)
_NOTE = (
    "Delays are from the end of a word in the audio to its final text, of words whose time is "
    "known. Changed: words of interim text that did not stay, per final word."
)


@dataclasses.dataclass(frozen=True)
class Level:
    """Figures of one number of streams."""

    streams: int
    words: int
    matched: int  # words with a known time
    p50_s: float
    p95_s: float
    p99_s: float
    changed_per_word: float  # words of hypotheses that did not stay; none of them was final
    cer: float  # %
    whole_cer: float  # % of the same recordings, each transcribed as a whole
    failed: int  # utterances without text

    @property
    def checks(self) -> tuple[Check, ...]:
        """Return the checks of this number of streams."""
        late = f"95 of 100 words are final within {HELD_S:g} s"
        worse = f"CER at most {MAX_WORSE:g} points above that of whole recordings"
        points = self.cer - self.whole_cer
        streams = f" with {self.streams} stream{'s' * (self.streams > 1)}"
        failed = f"{self.failed} failed"
        return (
            Check("every utterance has its text" + streams, not self.failed, failed),
            Check(late + streams, self.p95_s <= HELD_S, f"{self.p95_s:.2f} s"),
            Check(worse + streams, points <= MAX_WORSE, f"{points:+.2f} points"),
        )

    @property
    def row(self) -> list[str]:
        """Return the row of the report."""
        times_s, rates = (self.p50_s, self.p95_s, self.p99_s), (self.cer, self.whole_cer)
        return [
            str(self.streams),
            *(f"{value:.2f}" for value in (*times_s, self.changed_per_word)),
            *(str(self.words), f"{100 * self.matched / max(1, self.words):.0f} %"),
            *(f"{rate:.2f} %" for rate in rates),
        ]


def live(
    run: Run, *, streams: tuple[int, ...], clips: int, join_s: float, simulate: float
) -> Result:
    """Measure live text of `passages`.

    Args:
        run: its record is kept anew with each number of streams.
        streams: the numbers of streams at a time, one after another; the checks are of the last.
        clips: the number of clips that each stream plays.
        join_s: as in `passages`.
        simulate: `decode_s` of `open_system`.

    Raises:
        EarshotError: a server did not start, or has failed.
    """
    whole, levels = dict[str, Transcript](), list[Level]()
    clips_in_turn = passages(run.config, join_s)
    with open_system(run.config, simulate) as system:
        for count in streams:
            # Streams next to each other play different clips.
            shares = [
                [clips_in_turn[(stream * 5 + i) % len(clips_in_turn)] for i in range(clips)]
                for stream in range(count)
            ]
            levels.append(_level(system, shares, whole, run.say))
            run.say("; ".join(map(" ".join, zip(HEADER, levels[-1].row, strict=True))))
            table = Table(HEADER, [level.row for level in levels], note=_NOTE)
            result = Result(levels, levels[-1].checks, (ReportSection("Live text", [table]),))
            run.keep(result)
    return result


@dataclasses.dataclass(frozen=True)
class _StreamedClip:
    clip: Clip
    text: str
    words: list[TimedWord]  # that became final
    failed: int  # utterances


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
        whole[file] = system.transcribe(request)
    total_s = max(sum(clip.duration_s for clip in share) for share in shares)
    say(f"{len(shares)} streams, {total_s:.0f} s at the pace of speech …")
    streamed, changed = list[_StreamedClip](), system.count_changed_words()

    def note(played: _StreamedClip) -> None:
        streamed.append(played)
        say(f"  {len(streamed)} of {sum(map(len, shares))} clips; {played.clip.file}")

    timed_shares = [(index * _APART_S, share) for index, share in enumerate(shares)]
    processes = processes_for(math.ceil(len(shares) / _STREAMS_PER_PROCESS))
    if system.loop is not None or processes == 1:
        _play_shares(note, system.play, timed_shares, system.loop)
    else:
        arguments = [(system.play, timed_shares[i::processes]) for i in range(processes)]
        longest_s = max(clip.duration_s for share in shares for clip in share)
        with ClientProcesses[_StreamedClip](
            _play_shares, arguments, longest_s + STALL_S
        ) as clients:
            while clips := clients.answers():
                for played in clips:
                    note(played)
    changed = system.count_changed_words() - changed
    times_s = [s for one in streamed for s in latencies(one.words, whole[one.clip.file])]
    if not times_s:
        raise EarshotError("no word became final that is in the whole clips; expected most")
    words = sum(len(played.words) for played in streamed)
    p50_s, p95_s, p99_s = map(float, np.percentile(times_s, (50, 95, 99)))
    return Level(
        streams=len(shares),
        words=words,
        matched=len(times_s),
        p50_s=p50_s,
        p95_s=p95_s,
        p99_s=p99_s,
        changed_per_word=changed / max(1, words),
        cer=_cer((played.clip, played.text) for played in streamed),
        whole_cer=_cer((played.clip, whole[played.clip.file].text) for played in streamed),
        failed=sum(played.failed for played in streamed),
    )


def _cer(texts: Iterable[tuple[Clip, str]]) -> float:
    """Return the errors of the clips' texts in % of the characters."""
    pairs = [(normalize_text(clip.text), normalize_text(text)) for clip, text in texts]
    references, hypotheses = zip(*pairs, strict=True)
    return 100 * jiwer.cer(list(references), list(hypotheses))


def _play_shares(
    note: Callable[[_StreamedClip], object],
    play: Play,
    shares: Sequence[tuple[float, Sequence[Clip]]],
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Play shares of clips at the same time, each after a wait in seconds."""

    async def play_share(wait_s: float, clips: Sequence[Clip]) -> None:
        await asyncio.sleep(wait_s)
        for clip in clips:
            note(await _play(play, clip))

    async def play_all() -> None:
        await asyncio.gather(*itertools.starmap(play_share, shares))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(play_all())


async def _play(play: Play, clip: Clip) -> _StreamedClip:
    options = {} if clip.language is None else {"language": clip.language}
    deltas: dict[str, list[tuple[float, str]]] = {}  # by utterance
    transcripts, failed = list[str](), 0
    async for heard in play([read_samples(clip.path)], options):
        event = heard.event
        match event["type"].rpartition(".")[2]:
            case "delta":
                deltas.setdefault(event["item_id"], []).append((heard.at_s, event["delta"]))
            case "completed":
                transcripts.append(event["transcript"])
            case "failed":
                failed += 1
    words = [word for utterance in deltas.values() for word in final_words(utterance)]
    return _StreamedClip(clip, " ".join(transcripts), words, failed)

"""Decode audio files and raw samples to blocks of 16 kHz mono float32 in [-1, 1].

Channels are averaged, or one is selected; soxr resamples. Blocks are decoded on demand, so a small
file that unpacks to a huge one is rejected when it exceeds a limit. Errors in a header are raised
before the first block. Errors that only decoding finds may follow valid blocks. Thread-safe; no
temporary files.

16-bit WAV is read in this process if its header's sizes fit the file. Decoding libraries read every
other file (`serve.speech.sources`) in a process per file (`serve.speech.sandbox`), so that a
malicious file harms no other request.

A file may consist of several joined files (`serve.speech.repair`). A stream may change its sample
rate and its channels. Each part is resampled separately, and the limits apply to all parts
together. An audio size that a WAV recorder left incomplete is corrected with a warning
(`serve.speech.repair`).

A truncated file is rejected if the truncation can be detected, because its text would look
complete. With `AudioLimits.partial` the remaining audio is decoded, with a warning. Detection by
format:
- WAV and AIFF, before decoding: libsndfile corrects the length silently, so the chunk's own size is
  compared, unless it is a placeholder (`serve.speech.repair`).
- FLAC, and MP3 with a Xing header, at their end: fewer samples than declared, or a decoding error.
  Without that header an MP3's length is only an estimate and is not used.
- OGG, before decoding: it declares no length, but its last page must be complete. The last parts
  of MP4, WebM, CAF, AVI, W64 and WMA (`serve.speech.containers`) and AMR's last frame are checked
  likewise.
- MP4, RF64, AU, SPHERE, WavPack, TTA and audio-only WebM and FLV, at their end: more than 0.25 s
  less than declared (codec delay makes their lengths inexact). WebM from a live recorder declares
  no length.
- AAC, AC3, MPEG and MP3 without that header are plain streams of frames: truncation cannot be
  detected.
"""

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Protocol

import numpy as np
import soxr

from serve.contract.errors import AudioError, AudioLimitError, ChannelError, EarshotError
from serve.contract.messages import Samples
from serve.speech import containers, repair
from serve.speech.channels import COLUMNS, UNKNOWN, Block, Layout, mix, select_column
from serve.speech.containers import Bytes
from serve.speech.file_types import EXPECTED
from serve.speech.meter import AudioLimits, DecodeBudget, ignore, never
from serve.speech.rate import SAMPLE_RATE
from serve.speech.sandbox import client as sandbox

BLOCK_VALUES = 1 << 16  # samples per block, all channels together
# PCM costs little to decode. In large blocks it needs the interpreter less often, for which a GPU's
# device thread waits.
_PCM_VALUES = 4 * BLOCK_VALUES


class AudioSource(Protocol):
    """An opened audio file."""

    rate: int  # the rate of the first block; later blocks may have another
    channels: int
    layout: Layout  # the layout of the latest block, or of the first block before it is read
    declared_s: float | None  # None if the file does not declare it reliably
    present_s: float | None  # the maximum from the file's size; None if unknown before decoding
    tolerance_s: float  # allowed difference to the declared length; 0 if lengths are exact

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """Yield blocks in order: the rate in Hz, and samples of shape (n, channels)."""
        ...

    def close(self) -> None: ...


class Pcm16:
    """A WAV file of 16-bit samples.

    libsndfile gives the same samples, but takes eight times as long: it calls Python for every
    4 KiB, which blocks other threads.
    """

    tolerance_s = 0.0
    layout = UNKNOWN

    def __init__(self, audio: Bytes, header: containers.WavHeader) -> None:
        channels = header.channels
        present = min(header.declared, len(audio) - header.begin) // (2 * channels)
        self._audio, self._begin = audio, header.begin
        self._end = header.begin + present * 2 * channels
        self.rate, self.channels = header.rate, channels
        declared = header.declared // (2 * channels)
        self.declared_s = declared / header.rate if header.rate else None
        self.present_s = present / header.rate if header.rate else None

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        size = max(1, _PCM_VALUES // self.channels) * 2 * self.channels
        for start in range(self._begin, self._end, size):
            data = self._audio[start : min(start + size, self._end)]
            block = np.frombuffer(data, "<i2").astype(np.float32).reshape(-1, self.channels)
            block *= 1 / 32768
            yield self.rate, block

    def close(self) -> None:
        pass


MIN_RATE = 1_000
MAX_RATE = 384_000
CHANNELS = (2, 8)  # minimum and maximum channels with channels = split

_MAX_PEAK = 8.0  # lossy decoders exceed 1 slightly; larger values have the wrong scale


def decode(
    audio: Bytes,
    limits: AudioLimits,
    stopped: Callable[[], bool] = never,
    warn: Callable[[str], None] = ignore,
) -> Generator[Samples, None, None]:
    """Decode a file block by block, on demand; closing the generator frees the decoder.

    Args:
        audio: a whole audio file.
        limits: the maximum length, size and CPU time.
        stopped: returns whether the request was cancelled; called at each block and each read.
        warn: called with each warning, at the latest before the generator ends: about truncated
            audio, if the limits allow it, or about a wrong header.

    Yields:
        float32 (n,), n > 0: the next samples, 16 kHz mono in [-1, 1]; at least one block.

    Raises:
        AudioError: at the first block: the file is empty or not audio, or its header shows an
            invalid sample rate, a truncation or a length beyond a limit. At any block: the audio
            is truncated, damaged, without samples, beyond a limit, or has invalid values.
        OptionError: the file has no such track.
        CancelledError: `stopped` returned true.
        UnavailableError, DeadlineError: the decoder's process was ended, or does not respond.
    """
    meter = DecodeBudget(limits, stopped, warn)
    return select_column(meter.metered(_decoded(audio, meter)), warn)


def from_samples(
    samples: Samples, sample_rate: int, limits: AudioLimits, stopped: Callable[[], bool] = never
) -> Generator[Samples, None, None]:
    """Check raw samples and resample them to 16 kHz block by block, on demand.

    Args:
        samples: float32 (n,), mono in [-1, 1].
        sample_rate: Hz.
        limits: the maximum length, size and CPU time.
        stopped: returns whether the request was cancelled; called at each block.

    Yields:
        float32 (n,), n > 0: the next samples, 16 kHz mono in [-1, 1]; at least one block, never a
        view of the array passed in.

    Raises:
        AudioError: at the first block: wrong type, shape, rate or length; at any: wrong values.
        CancelledError: `stopped` returned true.
    """
    meter = DecodeBudget(limits, stopped)
    return meter.metered(_checked_samples(samples, sample_rate, meter))


def join_blocks(blocks: Iterable[Samples]) -> Samples:
    """Join all blocks to one array, float32 (n,)."""
    return np.concatenate(list(blocks))


def samples_of(
    sources: Iterable[AudioSource], meter: DecodeBudget
) -> Generator[Samples, None, None]:
    """Decode opened files in this process, one after another, as the parts of one recording.

    Args:
        sources: the files; each is opened on demand and closed after its last block.
        meter: the limits of all parts together.

    Yields, raises: see `decode`.
    """
    blocks = mix(_parts(sources, meter), meter.limits.channel, meter.warn)
    yield from _to_16_khz(blocks, meter.limits.max_s)


def _decoded(audio: Bytes, meter: DecodeBudget) -> Generator[Samples, None, None]:
    if not audio:
        raise AudioError(f"audio has 0 bytes; {EXPECTED}")
    header = containers.pcm16_header(audio)
    if header is not None and repair.has_right_size(audio) and not meter.limits.track:
        yield from samples_of([Pcm16(audio, header)], meter)
    else:
        yield from sandbox.decode(audio, meter.limits, meter.stopped, meter.warn)


def _checked_samples(
    samples: Samples, sample_rate: int, meter: DecodeBudget
) -> Generator[Samples, None, None]:
    if not isinstance(samples, np.ndarray) or samples.dtype != np.float32 or samples.ndim != 1:
        dtype = getattr(samples, "dtype", type(samples).__name__)
        shape = getattr(samples, "shape", "")
        raise AudioError(f"audio samples are {dtype} {shape}; expected float32 of shape (n,)")
    _check_rate(sample_rate)
    max_s = meter.limits.max_s
    if len(samples) / sample_rate > max_s:
        raise _too_long(f"lasts {len(samples) / sample_rate:.1f} s", max_s)
    meter.check_total(len(samples))
    starts = range(0, len(samples), BLOCK_VALUES)
    yield from _to_16_khz(((sample_rate, samples[i : i + BLOCK_VALUES]) for i in starts), max_s)


def _parts(sources: Iterable[AudioSource], meter: DecodeBudget) -> Iterator[Block]:
    """Yield the blocks of all parts."""
    decoded_s, channels = 0.0, 0
    for source in sources:
        with contextlib.closing(source):
            meter.end_header()
            _check_header(source, meter, decoded_s)
            for rate, block in _check_blocks(source, meter):
                channels = channels or block.shape[1]
                if meter.limits.channel >= 0 and block.shape[1] != channels:
                    raise AudioError(
                        f"audio changes from {channels} to {block.shape[1]} channels after "
                        f"{decoded_s:.2f} s; expected a constant number of channels, or "
                        "channels = mix"
                    )
                decoded_s += len(block) / rate
                yield rate, source.layout, block


def _check_header(source: AudioSource, meter: DecodeBudget, earlier_s: float) -> None:
    """Check the header of a part that begins after `earlier_s` seconds of audio."""
    _check_rate(source.rate)
    _check_channel(source.channels, meter.limits.channel)
    max_s = meter.limits.max_s
    if (declared_s := source.declared_s) is None:
        return
    if earlier_s + declared_s > max_s:
        raise _too_long(f"lasts {earlier_s + declared_s:.1f} s", max_s)
    if source.present_s is not None:
        _check_length(source, source.present_s, meter)
    meter.check_total(declared_s * source.rate * source.channels)


def _check_blocks(source: AudioSource, meter: DecodeBudget) -> Iterator[tuple[int, Samples]]:
    """Yield a source's blocks; reject a source that is shorter than its header declares."""
    decoded_s = 0.0
    try:
        for rate, block in source.blocks():
            _check_rate(rate)
            meter.count(block.size)
            decoded_s += len(block) / rate
            yield rate, block
    except (EarshotError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - decoders raise any type; PyAV even an IndexError
        meter.cut_short(_cut_short_text(decoded_s, source.declared_s), error)
    else:
        _check_length(source, decoded_s, meter)


def _check_channel(channels: int, channel: int) -> None:
    min_channels, max_channels = CHANNELS
    if channel >= 0 and not min_channels <= channels <= max_channels:
        raise AudioError(
            f"audio has {channels} channel{'s' * (channels != 1)}; expected {min_channels} to "
            f"{max_channels}, one per speaker, or channels = mix"
        )
    if channel >= channels:
        raise ChannelError(f"audio has {channels} channels, but no channel {channel}")


def _check_length(source: AudioSource, present_s: float, meter: DecodeBudget) -> None:
    tolerance_s = source.tolerance_s or 0.5 / source.rate  # half a sample against rounding
    if source.declared_s is not None and present_s < source.declared_s - tolerance_s:
        meter.cut_short(_cut_short_text(present_s, source.declared_s))


def _too_long(duration: str, max_s: float) -> AudioLimitError:
    return AudioLimitError(f"audio {duration}; expected at most {max_s:g} s: send it in parts")


def _cut_short_text(present_s: float, declared_s: float | None) -> str:
    declared = "" if declared_s is None else f" of the {declared_s:.2f} s it declares"
    return f"audio is cut short or damaged: {present_s:.2f} s{declared} can be decoded"


def _check_rate(rate: int) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise AudioError(f"audio has a rate of {rate} Hz; expected {MIN_RATE} to {MAX_RATE} Hz")


def _to_16_khz(
    blocks: Iterable[tuple[int, Samples]], max_s: float
) -> Generator[Samples, None, None]:
    """Check, resample and clip blocks of samples.

    Args:
        blocks: the rate in Hz and the samples of each block; the rate may change between blocks.
        max_s: the maximum seconds of all blocks together; more raise an AudioLimitError.
    """
    has_samples = False
    for samples in _resampled(_checked(blocks, max_s)):
        if len(samples):
            has_samples = True
            yield np.clip(samples, -1.0, 1.0)
    if not has_samples:
        raise AudioError("audio has no samples (0 s); expected at least one")


def _checked(blocks: Iterable[tuple[int, Samples]], max_s: float) -> Iterator[tuple[int, Samples]]:
    earlier_s, last_rate, count = 0.0, SAMPLE_RATE, 0  # count: samples at last_rate
    for rate, block in blocks:
        if rate != last_rate:
            earlier_s, last_rate, count = earlier_s + count / last_rate, rate, 0
        check_values(block, earlier_s + count / rate)
        count += len(block)
        if earlier_s + count / rate > max_s:
            raise _too_long(f"lasts more than {max_s:g} s", max_s)
        yield rate, block


def _resampled(blocks: Iterable[tuple[int, Samples]]) -> Iterator[Samples]:
    for rate, group in itertools.groupby(blocks, operator.itemgetter(0)):
        same_rate = map(operator.itemgetter(1), group)
        if rate == SAMPLE_RATE:
            yield from same_rate
            continue
        first = next(same_rate)
        columns = 1 if first.ndim == 1 else COLUMNS
        resampler = soxr.ResampleStream(rate, SAMPLE_RATE, columns, dtype="float32", quality="HQ")
        for block in itertools.chain([first], same_rate):
            yield resampler.resample_chunk(block)
        yield resampler.resample_chunk(first[:0], last=True)  # the samples that the filter holds


def check_values(block: Samples, start_s: float) -> None:
    """Check that samples, float32 (n,), are finite and roughly within -1 to 1.

    Raises:
        AudioError: a sample is invalid; the message has `start_s`, the block's start in seconds.
    """
    peak = max(float(block.max(initial=0.0)), -float(block.min(initial=0.0)))
    if not math.isfinite(peak):
        raise AudioError(
            f"audio has NaN or infinite samples after {start_s:.1f} s; expected finite numbers"
        )
    if peak > _MAX_PEAK:
        raise AudioError(
            f"audio samples reach {peak:.6g}; expected -1 to 1 (divide 16-bit samples by 32768)"
        )

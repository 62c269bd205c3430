"""Speech whose words' times are known: espeak-ng says where in the sound each word begins.

Called through its C library, which `apt-get install espeak-ng` brings; see its `speak_lib.h`.
"""

import ctypes
import ctypes.util
import dataclasses
from typing import Any

import numpy as np

from serve.contract.errors import UnavailableError
from serve.contract.messages import Samples

_RETRIEVAL = 1  # AUDIO_OUTPUT_RETRIEVAL: the sound goes to a call back
_WORD_EVENT, _END_OF_EVENTS = 1, 0
_UTF8 = 1
_FAILED = -1


class _Event(ctypes.Structure):
    """espeak_EVENT."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),  # in characters, from 1
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),  # ms
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


@dataclasses.dataclass(frozen=True)
class Speech:
    """A sentence as it was spoken."""

    samples: Samples
    rate: int  # Hz
    words: tuple[tuple[str, float], ...]  # (word, when it begins in s)


class Espeak:
    """The synthesiser; one a process.

    Raises:
        UnavailableError: its library is not installed.
    """

    def __init__(self) -> None:
        name = ctypes.util.find_library("espeak-ng") or "libespeak-ng.so.1"
        try:
            self._library: Any = ctypes.CDLL(name)
        except OSError as error:
            raise UnavailableError(
                f"the true times of words come from espeak-ng, which is not installed ({error}); "
                "apt-get install espeak-ng"
            ) from error
        self._rate = self._library.espeak_Initialize(_RETRIEVAL, 0, None, 0)
        if self._rate == _FAILED:
            raise UnavailableError("espeak-ng found none of its data; apt-get install espeak-ng")
        self._sound: list[Any] = []
        self._begins: list[tuple[int, int, int]] = []
        self._callback = _CALLBACK(self._take)  # the library keeps its address
        self._library.espeak_SetSynthCallback(self._callback)

    def speak(self, text: str, voice: str) -> Speech:
        """Speak a text.

        Args:
            text: one sentence.
            voice: such as en-us, or with a variant, en-us+f3.

        Raises:
            UnavailableError: espeak-ng has no such voice.
        """
        self._sound, self._begins = [], []
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise UnavailableError(f"espeak-ng has no voice {voice!r}")
        data = text.encode()
        size = ctypes.c_size_t(len(data) + 1)
        self._library.espeak_Synth(data, size, 0, 1, 0, _UTF8, None, None)
        self._library.espeak_Synchronize()
        samples = np.concatenate(self._sound).astype(np.float32) / 32768
        words = tuple(
            (text[at - 1 : at - 1 + length], sample / self._rate)
            for at, length, sample in self._begins
        )
        return Speech(samples, self._rate, words)

    def _take(self, sound: Any, count: int, events: Any) -> int:
        if sound and count > 0:
            self._sound.append(np.ctypeslib.as_array(sound, (count,)).copy())
        index = 0
        while events[index].type != _END_OF_EVENTS:
            event = events[index]
            if event.type == _WORD_EVENT:
                self._begins.append((event.text_position, event.length, event.sample))
            index += 1
        return 0

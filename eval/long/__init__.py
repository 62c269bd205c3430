"""Long recordings with known text: the words that systems lose, repeat and make up.

All systems have the same checkpoint, the same CPU threads, a beam of 5 and Whisper's temperatures.
faster-whisper is also told the checkpoint's list of suppressed tokens. The options below are the
only other differences. The command line reads these names, so this imports no package.
"""

from typing import Any

OUR_DEFAULT = "earshot-parallel"
OURS: dict[str, dict[str, Any]] = {  # options of a request
    OUR_DEFAULT: {},
    "earshot-no-vad": {"vad": False},
    "earshot-sequential": {"mode": "sequential"},
    "earshot-no-timestamps": {"timestamps": False},
    "earshot-multilingual": {"multilingual": True},
}

_NO_CONTEXT: dict[str, Any] = {"condition_on_previous_text": False}
_VAD: dict[str, Any] = {"vad_filter": True}
THEIRS: dict[str, dict[str, Any]] = {  # options of a call
    "faster-whisper-default": {},
    "faster-whisper-vad": _VAD,
    "faster-whisper-no-context": _NO_CONTEXT,
    "faster-whisper-no-context-vad": _NO_CONTEXT | _VAD,
    "faster-whisper-multilingual": _NO_CONTEXT | _VAD | {"multilingual": True},
}
THEIRS_BATCHED: dict[str, dict[str, Any]] = {  # options of a call of BatchedInferencePipeline
    "faster-whisper-batched": {},
    "faster-whisper-batched-times": {"without_timestamps": False},
    "faster-whisper-batched-multilingual": {"multilingual": True},
}
NAMES = (*OURS, *THEIRS, *THEIRS_BATCHED)
WITHOUT_SPEECH_SYSTEMS = (
    "earshot-parallel",
    "earshot-no-vad",
    "faster-whisper-default",
    "faster-whisper-vad",
)
"""The systems that hear short clips without speech; the first is ours as configured."""

RIVALS: dict[str, tuple[str, ...]] = {
    OUR_DEFAULT: (
        "faster-whisper-default",
        "faster-whisper-vad",
        "faster-whisper-no-context",
        "faster-whisper-no-context-vad",
        "faster-whisper-batched-times",
    ),
    "earshot-no-timestamps": ("faster-whisper-batched",),
    "earshot-multilingual": ("faster-whisper-multilingual",),
}
"""The systems that ours are compared with: they are asked for as much. `faster-whisper-batched` is
not asked for the text's times, which is another task: it decodes without timestamps."""

"""Long recordings with known text: the words that systems lose, repeat and make up.

All systems have the same checkpoint, the same CPU threads, a beam of 5 and Whisper's temperatures.
faster-whisper is also told the checkpoint's list of suppressed tokens. The options in
`eval.accuracy.systems` are the only other differences.
"""

from eval.accuracy.systems import LONG_OURS, LONG_THEIRS

OUR_DEFAULT = "earshot-parallel"
NAMES = (*LONG_OURS, *LONG_THEIRS)
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

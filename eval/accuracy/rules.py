"""The rules of comparison, as every report states them."""

from eval.accuracy.score import BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED
from eval.memory import SAMPLE_S

RULES = (
    "Every system gets a file's bytes, in the same order, and returns the whole text; "
    "decoding the audio is timed. Either every system is told the language or none is: see "
    "under the title. Each runs alone in its own process, on the same CPU cores.",
    "faster-whisper decodes with its own defaults (a beam of 5), or greedily where its name "
    "says so, but for the list of suppressed tokens, which is the checkpoint's, and, with "
    "checkpoints that are not published ones, no text of earlier windows in the prompt. "
    "`faster-whisper-library-defaults` is told nothing at all.",
    "CER and WER: jiwer; all edits of all clips / length of all references, spaces count as "
    'characters. Scored is a pass over all clips before any that is timed; "unstable" counts '
    "the clips whose text was not the same in every call. Text on a clip with an empty "
    "reference counts as insertions. Intervals: 95 %, percentile bootstrap over clips, "
    f"{BOOTSTRAP_SAMPLES} draws, seed {BOOTSTRAP_SEED}; the draws of two systems are paired.",
    "Gates: passed where the whole interval of a gap is at most the limit, failed where it is "
    "above it as a whole, else not decided: the clips are too few to tell. Each is judged on "
    "all clips that both systems heard, of the groups that decide where some are named. How many "
    "clips decide a gap is told from the width of its interval, which shrinks with the root of "
    "their number. faster-whisper's default is the more accurate of float32 and int8, of those "
    "that ran.",
    "Clips that cannot be decoded are given to nobody and count for nothing; so do those that "
    "no system could read.",
    "Latency: file bytes handed over until the whole answer is there, waiting in queues "
    "included; percentiles over all calls. Jitter: deviation of the same clip's latency "
    "between passes, root mean square over clips, so that different lengths of clips do not "
    "count.",
    "RTFx: seconds of real, unpadded audio answered / seconds of wall clock of the phase "
    "(throughput).",
    "Memory: highest resident set of the system's process and all its descendants, client "
    f"included, sampled every {SAMPLE_S:g} s; shared pages count in each process.",
)

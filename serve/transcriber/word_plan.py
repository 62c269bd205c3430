"""Check a request's options for word timestamps and word confidence."""

from serve.contract.errors import OptionError, shown
from serve.contract.manifest import Confidence
from serve.contract.messages import Request
from serve.runtime.protocol import Capabilities
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.audio import is_number


def words_of(
    request: Request, silence_s: float, tokenizer: Tokenizer, capabilities: Capabilities
) -> bool:
    """Return whether to time words, for the client or for an option that needs them.

    Raises:
        OptionError: words are needed, but the engine or the runtime cannot time them.
    """
    tried = request.try_word_timestamps
    needed = request.word_timestamps or request.token_logprobs or silence_s or request.diarize
    if capabilities.words:
        return bool(needed or tried)
    if not needed:
        return False
    if request.word_timestamps:
        what, without = "word_timestamps = true", "word_timestamps = false"
    elif request.token_logprobs:
        what, without = "token_logprobs = true needs words' times", "token_logprobs = false"
    elif request.diarize:
        what, without = "diarize = true needs words' times", "diarize = false"
    else:
        name = "hallucination_silence_threshold"
        what, without = f"{name} = {silence_s:g} needs words with times", f"{name} = 0"
    if not tokenizer.facts.alignment_heads:
        raise OptionError(
            f"{what}, but the engine has no alignment heads, which word timestamps need; rebuild "
            "it with `make build-engine`, which measures them"
        )
    raise OptionError(
        f"{what}, but the runtime {capabilities.runtime} cannot time words; serve an engine of the "
        f"native runtime, or ask for {without}"
    )


def low_confidence_of(request: Request, confidence: Confidence | None) -> float | None:
    """Return the confidence below which words are marked; None if no words are marked.

    Raises:
        OptionError: the value is not a probability, or the words have no confidence.
    """
    low = request.low_confidence
    if low is None:
        return None
    if not is_number(low) or not 0.0 <= low <= 1.0:
        raise OptionError(f"low_confidence = {shown(low)}; expected a number from 0 to 1")
    if not request.word_timestamps:
        raise OptionError(
            f"low_confidence = {low:g} needs words with times; expected word_timestamps = true"
        )
    if request.task == "translate":
        raise OptionError(
            f"low_confidence = {low:g}, but the words of a translation have no confidence; leave "
            "it out"
        )
    if confidence is None:
        raise OptionError(
            f"low_confidence = {low:g}, but the engine has no confidence calibration; rebuild it "
            "with build.confidence, which `python -m eval trust` fits"
        )
    return float(low)

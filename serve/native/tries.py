"""The text of a window that has ended; where its language is unsure, in the likeliest few of them.

A window's slot keeps what the encoder made of it, so one language more costs the decoder's steps
alone. The likeliest text stays, with the probability of its language counted in: as if the language
were one more token of the text, and were searched for as a beam search does.
"""

import dataclasses
import math
from collections.abc import Sequence

from serve.contract.engine import DETECT_LANGUAGE
from serve.native.rules.state import RowState
from serve.native.slots import Place
from serve.runtime.protocol import Event, Job


@dataclasses.dataclass(frozen=True)
class Try:
    """A window in one language."""

    event: Event  # what the job's last event would be
    language: int | None  # token id; None where the client named it
    prob: float  # of the language, among all that it may be
    logprob: float  # of all that was sampled

    @property
    def rank(self) -> tuple[bool, float]:
        """Higher is better; text that was cut short, as loops are, is worse than any that ended."""
        likeliest = math.log(max(self.prob, 1e-30)) + self.logprob
        return self.event.finished == "eot", likeliest


def try_of(event: Event, logprob: float, before: Sequence[Try]) -> Try:
    """Rate a window's end in the likeliest of the languages that had not been tried before."""
    scores = event.scores
    assert scores is not None, "a window that ended has scores"
    if scores.language is None or scores.language_prob is None:
        return Try(event, None, 1.0, logprob)
    prob = scores.language_prob * (1.0 - sum(try_.prob for try_ in before))
    scores = dataclasses.replace(scores, language_prob=prob)
    return Try(dataclasses.replace(event, scores=scores), scores.language, prob, logprob)


def next_try(job: Job, tries: Sequence[Try], known: Sequence[int], next_id: int) -> Job | None:
    """The same window in the likeliest language that is left; None: there were tries enough.

    Args:
        job: the last one.
        tries: what came of it and of those before it.
        known: the checkpoint's languages.
        next_id: of the new job.
    """
    wanted = job.detection
    if DETECT_LANGUAGE not in job.prompt or len(tries) >= wanted.tries:
        return None
    if sum(try_.prob for try_ in tries) >= wanted.certainty:
        return None
    tried = [try_.language for try_ in tries]
    left = tuple(language for language in wanted.languages or known if language not in tried)
    if not left:
        return None
    detection = dataclasses.replace(wanted, languages=left)
    return dataclasses.replace(job, id=next_id, detection=detection, draft=())


def best(tries: Sequence[Try]) -> Event:
    """The event of the best one, of equals the first's; it has taken as long as all of them."""
    event, last = max(tries, key=lambda try_: try_.rank).event, tries[-1].event
    assert event.scores is not None and last.scores is not None, "windows that ended have scores"
    scores = dataclasses.replace(event.scores, decode_s=last.scores.decode_s)
    return dataclasses.replace(event, scores=scores)


def best_sequence(job: Job, place: Place, state: RowState, eot: int) -> tuple[list[int], float]:
    """Return a finished job's tokens, end of text included, and the sum of their log-probabilities.

    Of several samples the one with the highest sum / length ** length_penalty, length without end
    of text, as CTranslate2 ranks them.
    """
    begin, leader = len(job.prompt), place.first_row
    if job.options.temperature == 0 and place.count > 1:
        end = begin + int(state.best_length[leader])
        ended = [eot] if state.best_is_ended[leader] else []
        sampled = state.best_tokens[leader, begin:end].tolist() + ended
        return sampled, float(state.best_logprob_sum[leader])

    def rank(sequence: tuple[list[int], float]) -> float:
        tokens, logprob_sum = sequence
        length = len(tokens) - (tokens[-1] == eot)
        return logprob_sum / length**job.options.length_penalty if length else -math.inf

    def sample(row: int) -> tuple[list[int], float]:
        end = int(state.position[row]) + 1
        return state.tokens[row, begin:end].tolist(), float(state.logprob_sum[row])

    return max(map(sample, place.rows), key=rank)

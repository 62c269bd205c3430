"""Tries of a window that has ended: in the few likeliest languages, where its language is unsure.

A window's slot keeps what the encoder made of it, so one more try costs decoder steps alone.

- A transcript whose language is unsure is tried in the next likeliest language, too. The likeliest
  text stays, with the probability of its language counted in: as if the language were one more
  token of the text, and were searched for as a beam search does.
- A translation whose language is unsure is transcribed in the likeliest languages first. The best
  transcript decides the language; the English text never does, for an invented one may be likely.
- A window whose prompt names the language of other windows is tried in its own language, too, where
  that is likely another one (`Detection.switch`). The likelier text stays here, too. A translation
  takes the window's own language.
- A window's own language may be unsure: then the rules above hold for it.
"""

import dataclasses
import math
from collections.abc import Sequence

from serve.contract.engine import DETECT_LANGUAGE, TokenizerFacts
from serve.native.rules.state import RowState
from serve.native.slots import Place
from serve.runtime.protocol import Event, Job


@dataclasses.dataclass(frozen=True)
class Try:
    """A window in one language."""

    job: Job  # the job that decoded it
    event: Event  # the last event of the submitted job, if this try is its answer
    language: int | None  # token id; None where the prompt names it
    prob: float  # of the language, among all that it may be
    logprob: float  # of all that was sampled

    @property
    def rank(self) -> tuple[bool, float]:
        """Higher is better; text that was cut short, as loops are, is worse than any that ended."""
        likeliest = math.log(max(self.prob, 1e-30)) + self.logprob
        return self.event.finished == "eot", likeliest


def try_of(
    job: Job, event: Event, logprob: float, before: Sequence[Try], facts: TokenizerFacts
) -> Try:
    """Rate a window's end in the likeliest of the languages that had not been tried before.

    Args:
        job: the job that decoded it.
        event: its last event, with scores.
        logprob: of all that was sampled.
        before: the earlier tries of the window.
        facts: the checkpoint's special tokens.
    """
    scores = event.scores
    assert scores is not None, "a window that ended has scores"
    if scores.language is None or scores.language_prob is None:
        # Where another language is heard, the named one is at most so likely.
        prob = 1.0 if scores.heard is None else 1.0 - scores.heard[1]
        return Try(job, event, None, prob, logprob)
    detected = [t for t in before if t.language is not None]
    alike = [t for t in detected if _translates(t.job, facts) == _translates(job, facts)]
    prob = scores.language_prob * (1.0 - sum(t.prob for t in alike))
    scores = dataclasses.replace(scores, language_prob=prob)
    return Try(job, dataclasses.replace(event, scores=scores), scores.language, prob, logprob)


def next_try(job: Job, tries: Sequence[Try], facts: TokenizerFacts, next_id: int) -> Job | None:
    """Return the job of the window's next try; None: there were tries enough.

    Args:
        job: the submitted job.
        tries: the tries so far, at least one.
        facts: the checkpoint's languages and special tokens.
        next_id: the new job's id.
    """
    named = _named(job, facts)
    if named is not None:
        if not _is_likely_in_another(job, tries[0], named):
            return None
        tries = tries[1:]
        job = dataclasses.replace(job, prompt=_with_language(job, DETECT_LANGUAGE, facts))
    if not tries:
        again: Job | None = job
    elif _translates(job, facts):
        again = _next_of_translation(job, tries, facts)
    else:
        again = _in_next_language(job, tries, facts, without=named)
    return again and dataclasses.replace(again, id=next_id, draft=())


def best(tries: Sequence[Try], facts: TokenizerFacts) -> Try:
    """Return the try that is the window's answer; its event has taken as long as all of them.

    It is the likeliest one, of equals the first. A translation is in the language of the likeliest
    transcript, or in the window's own one.
    """
    own = tries if _named(tries[0].job, facts) is None else tries[1:]
    if not own or not _translates(tries[0].job, facts):
        answer = max(tries, key=lambda t: t.rank)
    else:
        transcripts = [t for t in own if not _translates(t.job, facts)]
        likeliest = max(transcripts or own, key=lambda t: t.rank)
        answer = next(
            t for t in own if _translates(t.job, facts) and t.language == likeliest.language
        )
        answer = dataclasses.replace(answer, prob=likeliest.prob)
    scores, last = answer.event.scores, tries[-1].event.scores
    assert scores is not None and last is not None, "windows that ended have scores"
    if scores.language_prob is not None:
        scores = dataclasses.replace(scores, language_prob=answer.prob)
    heard = scores.heard if len(tries) == 1 else None  # else the texts have told
    scores = dataclasses.replace(scores, decode_s=last.decode_s, heard=heard)
    return dataclasses.replace(answer, event=dataclasses.replace(answer.event, scores=scores))


def _translates(job: Job, facts: TokenizerFacts) -> bool:
    """Tell whether a job translates: the task stands behind start-of-transcript and language."""
    at = job.prompt.index(facts.sot) + 2
    return facts.translate is not None and job.prompt[at : at + 1] == (facts.translate,)


def _named(job: Job, facts: TokenizerFacts) -> int | None:
    """Return the language that a job's prompt names, a token id; None: it names none."""
    at = job.prompt.index(facts.sot) + 1
    token = job.prompt[at] if at < len(job.prompt) else None
    return token if token in facts.languages.values() else None


def _with_language(job: Job, token: int, facts: TokenizerFacts) -> tuple[int, ...]:
    """Return a job's prompt with another token where it names the language."""
    at = job.prompt.index(facts.sot) + 1
    return (*job.prompt[:at], token, *job.prompt[at + 1 :])


def _is_likely_in_another(job: Job, first: Try, named: int) -> bool:
    """Tell whether a window whose prompt names a language is to be tried in another one."""
    scores, wanted = first.event.scores, job.detection
    if wanted.switch <= 0 or scores is None or scores.heard is None:
        return False
    language, prob = scores.heard
    close = any({language, named} <= languages for languages in wanted.close)
    return language != named and prob >= wanted.switch and not close


def _in_next_language(
    job: Job, tries: Sequence[Try], facts: TokenizerFacts, without: int | None = None
) -> Job | None:
    """Return the job that tries the next likeliest language; one it leaves out was tried before."""
    wanted = job.detection
    if len(tries) >= wanted.tries or sum(t.prob for t in tries) >= wanted.certainty:
        return None
    tried = [without, *(t.language for t in tries)]
    known = wanted.languages or sorted(facts.languages.values())
    left = tuple(language for language in known if language not in tried)
    if not left:
        return None
    return dataclasses.replace(job, detection=dataclasses.replace(wanted, languages=left))


def _next_of_translation(job: Job, tries: Sequence[Try], facts: TokenizerFacts) -> Job | None:
    """Return the next transcript of a window to translate, or its translation once more."""
    wanted, first, transcripts = job.detection, tries[0], tries[1:]
    if first.prob >= wanted.certainty or wanted.tries < 2:
        return None
    if transcripts and _translates(tries[-1].job, facts):
        return None
    if again := _in_next_language(_transcript_of(job, facts), transcripts, facts):
        return again
    language = max(transcripts, key=lambda t: t.rank).language
    assert language is not None, "it was detected"
    if language == first.language:
        return None
    return dataclasses.replace(job, detection=dataclasses.replace(wanted, languages=(language,)))


def _transcript_of(job: Job, facts: TokenizerFacts) -> Job:
    """Return the job that transcribes what a job translates, without its English words."""
    assert facts.transcribe is not None, "a checkpoint that translates transcribes"
    start = job.prompt[: len(job.prompt) - job.prefix]
    at = start.index(DETECT_LANGUAGE) + 1
    options = dataclasses.replace(job.options, phrases=None)
    prompt = (*start[:at], facts.transcribe, *start[at + 1 :])
    return dataclasses.replace(job, prompt=prompt, prefix=0, options=options)


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

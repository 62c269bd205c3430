"""Choose the text of a finished window; if its language is uncertain, decode it in other languages.

The slot keeps the encoder's output, so another language costs decoder steps only.

- A transcript of uncertain language is also decoded in the next likely language. The hypothesis
  with the highest log-probability wins. The language's log-probability counts as that of one
  more token, as in a beam search.
- A translation of uncertain language is first transcribed in the likely languages. The best
  transcript decides the language. The English text does not: a made-up text may be likely.
- The prompt may name the language of other windows. If the window is probably in another one
  (`Detection.switch`), it is also decoded in its own language. The likelier text wins. A
  translation uses the window's own language. If that language is uncertain, the rules above apply.
"""

import dataclasses
import math
from collections.abc import Sequence

from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.manifest import TokenizerFacts
from serve.native.rules.state import RowState
from serve.native.slots import SlotAllocation
from serve.runtime.protocol import Job, JobEvent


@dataclasses.dataclass(frozen=True)
class LanguageHypothesis:
    """The text of a window in one language."""

    job: Job  # the job that decoded it
    event: JobEvent  # the last event of the submitted job if this hypothesis wins
    language: int | None  # token id; None if the prompt names the language
    prob: float  # probability of the language among all allowed ones
    logprob: float  # log-probability of the sampled tokens

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key, higher is better: text that ended ranks above text that was cut off."""
        likeliest = math.log(max(self.prob, 1e-30)) + self.logprob
        return self.event.finished == "eot", likeliest


def score_language(
    job: Job,
    event: JobEvent,
    logprob: float,
    earlier: Sequence[LanguageHypothesis],
    facts: TokenizerFacts,
) -> LanguageHypothesis:
    """Score the text of a finished window, with the probability of its language.

    Args:
        job: the job that decoded the window.
        event: the job's last event, with scores.
        logprob: the log-probability of the sampled tokens.
        earlier: the earlier hypotheses of the window.
        facts: the checkpoint's special tokens.
    """
    scores = event.scores
    assert scores is not None, "a window that ended has scores"
    if scores.language is None or scores.language_prob is None:
        # If another language was detected, this is an upper bound for the named one.
        prob = 1.0 if scores.top_language is None else 1.0 - scores.top_language[1]
        return LanguageHypothesis(job, event, None, prob, logprob)
    translates = _translates(job, facts)
    detected = [hypothesis for hypothesis in earlier if hypothesis.language is not None]
    same_task = [one for one in detected if _translates(one.job, facts) == translates]
    prob = scores.language_prob * (1.0 - sum(hypothesis.prob for hypothesis in same_task))
    scores = dataclasses.replace(scores, language_prob=prob)
    return LanguageHypothesis(
        job, dataclasses.replace(event, scores=scores), scores.language, prob, logprob
    )


def next_language_job(
    job: Job, hypotheses: Sequence[LanguageHypothesis], facts: TokenizerFacts, next_id: int
) -> Job | None:
    """Return the job that decodes the window in another language; None if no other is needed.

    Args:
        job: the submitted job.
        hypotheses: the hypotheses so far, at least one.
        facts: the checkpoint's languages and special tokens.
        next_id: the id of the new job.
    """
    named_language = _named_language(job, facts)
    if named_language is not None:
        if not _is_likely_in_another(job, hypotheses[0], named_language):
            return None
        hypotheses = hypotheses[1:]
        job = dataclasses.replace(job, prompt=_with_language(job, DETECT_LANGUAGE, facts))
    if not hypotheses:
        next_job: Job | None = job
    elif _translates(job, facts):
        next_job = _next_of_translation(job, hypotheses, facts)
    else:
        next_job = _in_next_language(job, hypotheses, facts, excluded=named_language)
    return next_job and dataclasses.replace(next_job, id=next_id, draft=())


def best_hypothesis(
    hypotheses: Sequence[LanguageHypothesis], facts: TokenizerFacts
) -> LanguageHypothesis:
    """Return the hypothesis that is the window's answer; its `decode_s` is that of all hypotheses.

    The likeliest hypothesis wins, the first one among equals. A translation is that from the
    language of the likeliest transcript, or else from the window's own language.
    """
    detected = hypotheses if _named_language(hypotheses[0].job, facts) is None else hypotheses[1:]
    if not detected or not _translates(hypotheses[0].job, facts):
        answer = max(hypotheses, key=lambda hypothesis: hypothesis.rank)
    else:
        transcripts = [
            hypothesis for hypothesis in detected if not _translates(hypothesis.job, facts)
        ]
        likeliest = max(transcripts or detected, key=lambda hypothesis: hypothesis.rank)
        answer = next(
            hypothesis
            for hypothesis in detected
            if _translates(hypothesis.job, facts) and hypothesis.language == likeliest.language
        )
        answer = dataclasses.replace(answer, prob=likeliest.prob)
    scores, last = answer.event.scores, hypotheses[-1].event.scores
    assert scores is not None and last is not None, "windows that ended have scores"
    if scores.language_prob is not None:
        scores = dataclasses.replace(scores, language_prob=answer.prob)
    # Several texts have decided already.
    top_language = scores.top_language if len(hypotheses) == 1 else None
    scores = dataclasses.replace(scores, decode_s=last.decode_s, top_language=top_language)
    return dataclasses.replace(answer, event=dataclasses.replace(answer.event, scores=scores))


def _translates(job: Job, facts: TokenizerFacts) -> bool:
    """Return whether a job translates: the task token follows start-of-transcript and language."""
    task_index = job.prompt.index(facts.sot) + 2
    task = job.prompt[task_index : task_index + 1]
    return facts.translate is not None and task == (facts.translate,)


def _named_language(job: Job, facts: TokenizerFacts) -> int | None:
    """Return the token id of the language that a job's prompt names; None if it names none."""
    index = job.prompt.index(facts.sot) + 1
    token = job.prompt[index] if index < len(job.prompt) else None
    return token if token in facts.languages.values() else None


def _with_language(job: Job, token: int, facts: TokenizerFacts) -> tuple[int, ...]:
    """Return a job's prompt with its language token replaced."""
    index = job.prompt.index(facts.sot) + 1
    return (*job.prompt[:index], token, *job.prompt[index + 1 :])


def _is_likely_in_another(job: Job, first: LanguageHypothesis, named_language: int) -> bool:
    """Return whether a window is probably in another language than its prompt names."""
    scores, detection = first.event.scores, job.detection
    if detection.switch <= 0 or scores is None or scores.top_language is None:
        return False
    language, prob = scores.top_language
    is_close = any(
        {language, named_language} <= languages for languages in detection.close_languages
    )
    return language != named_language and prob >= detection.switch and not is_close


def _in_next_language(
    job: Job,
    hypotheses: Sequence[LanguageHypothesis],
    facts: TokenizerFacts,
    excluded: int | None = None,
) -> Job | None:
    """Return a job that detects a language among those not tried yet; None ends the search."""
    detection = job.detection
    if (
        len(hypotheses) >= detection.max_languages
        or sum(hypothesis.prob for hypothesis in hypotheses) >= detection.certainty
    ):
        return None
    tried = [excluded, *(hypothesis.language for hypothesis in hypotheses)]
    allowed = detection.languages or sorted(facts.languages.values())
    remaining = tuple(language for language in allowed if language not in tried)
    if not remaining:
        return None
    return dataclasses.replace(job, detection=dataclasses.replace(detection, languages=remaining))


def _next_of_translation(
    job: Job, hypotheses: Sequence[LanguageHypothesis], facts: TokenizerFacts
) -> Job | None:
    """Return the next transcript of a window to translate, or its second translation."""
    detection, first, transcripts = job.detection, hypotheses[0], hypotheses[1:]
    if first.prob >= detection.certainty or detection.max_languages < 2:
        return None
    if transcripts and _translates(hypotheses[-1].job, facts):
        return None
    if next_transcript := _in_next_language(_transcript_of(job, facts), transcripts, facts):
        return next_transcript
    language = max(transcripts, key=lambda hypothesis: hypothesis.rank).language
    assert language is not None, "it was detected"
    if language == first.language:
        return None
    return dataclasses.replace(job, detection=dataclasses.replace(detection, languages=(language,)))


def _transcript_of(job: Job, facts: TokenizerFacts) -> Job:
    """Return the transcription job of a translation job, without its English phrases."""
    assert facts.transcribe is not None, "a checkpoint that translates transcribes"
    start = job.prompt[: len(job.prompt) - job.prefix]
    task_index = start.index(DETECT_LANGUAGE) + 1
    options = dataclasses.replace(job.options, phrases=None)
    prompt = (*start[:task_index], facts.transcribe, *start[task_index + 1 :])
    return dataclasses.replace(job, prompt=prompt, prefix=0, options=options)


def best_sequence(
    job: Job, allocation: SlotAllocation, state: RowState, eot: int
) -> tuple[list[int], float]:
    """Return a finished job's tokens with end of text, and the sum of the log-probabilities.

    Among several samples, return the one with the highest sum / length ** length_penalty. The
    length excludes end of text, as in CTranslate2.
    """
    begin, leader = len(job.prompt), allocation.first_row
    if job.options.temperature == 0 and allocation.count > 1:
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

    return max(map(sample, allocation.rows), key=rank)

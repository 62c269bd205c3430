"""Whether figures of words are true: which words are right, the measures, the fit, the report."""

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest

from build.clips import Clip
from eval.trust.calibration import (
    HeardWord,
    checks_of,
    figures_of,
    fit_confidence,
    judge_words,
    reliability,
    right_words,
    section_of,
)
from serve.contract.errors import EarshotError
from serve.speech.judging import log_odds
from tests.eval.fakes import transcript


def right(reference, *words, language="en"):
    return right_words(reference, words, language)


def test_words_are_right_where_they_were_said():
    assert right("He saw the fox", " He", " saw", " a", " fox.") == [True, True, False, True]
    assert right("the fox", " the", " the", " fox").count(False) == 1, "said once, heard twice"
    assert right("so it is", " —", " So", " is") == [None, True, True]
    assert right("", " Thanks") == [False]
    assert right("so") == []


def test_a_word_that_is_several_is_right_if_all_are():
    assert right("a deutsch türkische Sache", " deutsch-türkische", " Sache") == [True, True]
    assert right("a deutsch türke Sache", " deutsch-türkische", " Sache") == [False, True]


def test_characters_are_compared_where_there_are_no_spaces():
    verdicts = right("作出了贡献。", "作", "出了", "供", "献", language="zh")
    assert verdicts == [True, True, False, True]


def test_a_figure_that_is_true_has_no_error():
    said = [0.25] * 8 + [0.75] * 8
    truth = [True] * 2 + [False] * 6 + [True] * 6 + [False] * 2
    found = reliability(np.array(said), np.array(truth))
    assert (found.words, found.right, found.said) == (16, 0.5, 0.5)
    assert found.ece == pytest.approx(0.0)
    assert found.brier == pytest.approx(0.25 * 0.75)
    assert found.auroc == pytest.approx((6 * 6 + 0.5 * (2 * 6 + 6 * 2)) / 64)
    # Too low in one bin and too high in the other: over all words it would even out.
    assert reliability(np.array(said), np.array(truth[::-1])).ece == pytest.approx(0.5)


def words_of(half, count, weights, language="en", beam_seed=0):
    """Words that are right as often as a logistic of these weights says."""
    chance = random.Random(f"{half} {language} {beam_seed}")
    words = []
    for number in range(count):
        probability, mean = chance.uniform(0.02, 0.98), -chance.random()
        z = weights[0] + weights[1] * log_odds(probability) + weights[2] * mean
        is_right = chance.random() < 1 / (1 + math.exp(-z))
        file = f"{half}{number // 5}"
        words.append(HeardWord(file, half, language, probability, mean, None, is_right))
    return words


TRUE = (1.5, 0.6, 2.0)


def weights_of(words):
    fit = fit_confidence(words, "checkpoint")
    return fit.intercept, fit.probability, fit.avg_logprob


def test_the_fit_finds_what_the_words_follow():
    assert weights_of(words_of("choose", 20_000, TRUE)) == pytest.approx(TRUE, abs=0.15)


def test_what_would_have_it_fall_counts_for_nothing():
    words = words_of("choose", 5_000, (0.5, 0.6, -2.0))
    _, weight, nothing = weights_of(words)
    assert nothing == 0.0 and weight > 0.3
    with pytest.raises(EarshotError, match="are not more often right"):
        weights_of(words_of("choose", 5_000, (0.5, -0.6, 0.0)))
    right = [dataclasses.replace(word, right=True) for word in words[:40]]
    with pytest.raises(EarshotError, match="40 words are right and 0 wrong; expected at least 30"):
        weights_of(right)


def test_figures_are_of_the_half_that_was_not_fitted_to():
    some, many = 2_000, 4_000
    both = {
        beam: [
            *words_of("choose", some, TRUE, beam_seed=beam),
            *words_of("choose", some // 2, TRUE, "de", beam_seed=beam),
            *words_of("report", many, TRUE, beam_seed=beam),
        ]
        for beam in (1, 5)
    }
    found = figures_of(both, "somebody")
    fit, rows = found.fit, {(row.beam_size, row.figure): row for row in found.rows}
    assert (fit.source, fit.languages, fit.words) == ("somebody", ("de", "en"), 2 * 3_000)
    assert (fit.intercept, fit.probability, fit.avg_logprob) == pytest.approx(TRUE, abs=0.3)
    assert rows[5, "fitted"].words == many
    assert rows[5, "fitted"].ece < 0.05 < rows[5, "probability"].ece
    assert [check.passed for check in checks_of(found)] == [True] * 4
    assert "5, fitted" in [row[0] for row in section_of(found).parts[1].rows]
    others = words_of("report", many, (0.0, 1.0, 0.0))  # of which probability is true
    for count, passed in ((many, False), (999, None)):
        unlike = figures_of({5: [*both[5][:3_000], *others[:count]]}, "somebody")
        assert [check.passed for check in checks_of(unlike)] == [passed] * 2
    with pytest.raises(EarshotError, match="the half 'report' has no word"):
        figures_of({5: both[5][:3_000]}, "somebody")


def test_clips_of_no_half_are_of_both_in_turn():
    clips = [Clip(f"{i}", Path(f"{i}"), "so", "en", 1.0) for i in range(3)]
    clips[2] = dataclasses.replace(clips[2], half="report")
    answers = [transcript("so …")] * 3
    found = judge_words(clips, answers)
    assert [(word.file, word.half) for word in found] == [
        *(("0", "choose"), ("1", "report"), ("2", "report"))
    ]
    assert found[0] == HeardWord("0", "choose", "en", 0.8, -0.5, None, True)

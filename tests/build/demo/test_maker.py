"""The demo checkpoint's makers: grammar, labels, windows, network. No GPU, no synthesiser."""

import hashlib
import itertools
import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from build.demo.maker.export import write_checkpoint
from build.demo.maker.labels import IGNORE, Segment, Style, build
from build.demo.maker.network import Geometry, Whisper
from build.demo.maker.numbers import english_number, english_time, spanish_number, spanish_time
from build.demo.maker.scoring import error_rate, normalise
from build.demo.maker.sound import pauses, resample, trim
from build.demo.maker.store import Store, pack
from build.demo.maker.synth import Utterance
from build.demo.maker.text import sentences, split_of
from build.demo.maker.tokenizer import SpecialIds
from build.demo.maker.voices import UNSEEN_ACCENT, UNSEEN_FLITE_VOICE, UNSEEN_VARIANTS, seen_voice
from build.demo.maker.windows import collate, draw_window, gather

CHECKPOINT = "build/demo/checkpoint"
IDS = SpecialIds()
RECIPE = "40bba1118b08530c107f06aa45898c0933431cf9441e040ef074e29c04eb541d"  # of its sentences


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{CHECKPOINT}/tokenizer.json")


def test_sentences_are_the_same_for_the_same_seed_and_keep_to_their_split():
    for split in ("train", "heldout"):
        first = list(itertools.islice(sentences(3, split), 50))
        assert first == list(itertools.islice(sentences(3, split), 50))
        assert first != list(itertools.islice(sentences(4, split), 50))
        assert {split_of(item.text) for item in first} == {split}


def test_sentences_are_those_that_the_demo_checkpoint_learned_from():
    """What a seed gives is part of the recipe: a change here makes another checkpoint."""
    drawn = [
        s.text for split in ("train", "heldout") for s in itertools.islice(sentences(0, split), 500)
    ]
    assert hashlib.sha256("\n".join(drawn).encode()).hexdigest() == RECIPE


def test_sentences_are_cased_punctuated_and_of_both_languages():
    items = list(itertools.islice(sentences(1), 400))
    assert {item.language for item in items} == {"en", "es"}
    for item in items:
        assert item.text[-1] in ".?"
        assert item.text.lstrip("¿")[0].isupper()
        assert not set(item.text) & set("{}~_|0123456789")
    assert len({word for item in items for word in item.text.split()}) > 1000


def test_a_split_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="validation"):
        next(sentences(1, "validation"))


def test_numbers_and_times_in_words():
    assert english_number(342) == "three hundred and forty-two"
    assert english_number(1005) == "one thousand five"
    assert spanish_number(342) == "trescientos cuarenta y dos"
    assert spanish_number(100) == "cien"
    assert spanish_number(21_000) == "veintiuno mil"
    assert english_time(12, 45) == "a quarter to one"
    assert english_time(7, 5) == "seven oh five"
    assert spanish_time(1, 30) == "la una y media"


def test_voices_kept_out_are_never_drawn_for_training():
    rng = random.Random(0)
    names = {seen_voice(rng, language).name for language in ("en", "es") for _ in range(3000)}
    assert UNSEEN_FLITE_VOICE not in names
    assert not any(name.startswith(UNSEEN_ACCENT) for name in names)
    assert not {name.partition("+")[2] for name in names} & set(UNSEEN_VARIANTS)


def test_labels_with_timestamps_language_and_earlier_text():
    segments = [Segment(0.5, 1.0, (5, 6)), Segment(2.0, 3.0, (7,))]
    made = build(segments, "es", Style(previous=(9, 9)), IDS)
    stamp = IDS.timestamp_begin
    head = [IDS.tail("<|startofprev|>"), 9, 9, IDS.sot, IDS.language("es")]
    body = [IDS.tail("<|transcribe|>"), stamp + 25, 5, 6, stamp + 50, stamp + 100, 7, stamp + 150]
    assert made.inputs == head + body
    assert made.labels == [IGNORE] * 3 + [IDS.language("es"), *body, IDS.eot]


def test_labels_without_timestamps_do_not_teach_the_choice_of_that():
    made = build([Segment(0.5, 1.0, (5,))], "en", Style(timestamps=False), IDS)
    assert made.labels == [IDS.language("en"), IDS.tail("<|transcribe|>"), IGNORE, 5, IDS.eot]


def test_labels_of_a_window_without_speech():
    made = build([], "en", Style(), IDS)
    nothing = [IDS.timestamp_begin, IDS.eot]
    assert made.labels == [IDS.tail("<|nospeech|>"), IGNORE, *nothing]
    assert made.inputs[-1] == IDS.timestamp_begin


def test_labels_of_speech_that_begins_late_or_is_cut():
    made = build([Segment(2.5, 3.0, (5,)), Segment(28.0, None, (6,))], "en", Style(), IDS)
    stamp = IDS.timestamp_begin
    assert made.labels[2:] == [stamp + 50, 5, stamp + 150, stamp + 1400, IDS.eot]


@pytest.fixture(scope="module")
def store(tokenizer: Tokenizer) -> Store:
    noise = np.random.default_rng(0)
    items = [
        Utterance(noise.integers(-9000, 9000, 16_000 + 999 * index, dtype=np.int16), text, code, "")
        for index, (text, code) in enumerate([("Hello.", "en"), ("Hola.", "es")] * 4)
    ]
    made = Store(tokenizer, torch.device("cpu"), hours=0.01)
    assert made.add(pack(items))
    return made


def test_store_refuses_what_does_not_fit(store: Store):
    big = Utterance(np.zeros(store.pcm.numel(), np.int16), "No.", "en", "")
    assert not store.add(pack([big]))


def test_windows_hold_each_utterance_where_their_labels_say(store: Store):
    rng = random.Random(2)
    drawn = [draw_window(store, rng, 160_000, IDS, 0.2) for _ in range(600)]
    windows = drawn[:20] + [w for w in drawn if w.placed and w.placed[-1].cut][:5]
    sound = gather(store, collate(store, windows, 160_000, IDS))
    assert any(not window.placed for window in windows)
    assert any(item.cut for window in windows for item in window.placed)
    for window, row in zip(windows, sound, strict=True):
        covered = torch.zeros(160_000, dtype=torch.bool)
        for item in window.placed:
            assert item.start + item.size <= 160_000
            covered[item.start : item.start + item.size] = True
            true = store.pcm[store.offsets[item.index] :][: item.size].float()
            piece = row[item.start : item.start + item.size]
            assert torch.nn.functional.cosine_similarity(piece, true, dim=0) > 0.999
        assert row[~covered].abs().sum() == 0


def test_batches_are_padded_with_nothing_to_learn(store: Store):
    rng = random.Random(2)
    windows = [draw_window(store, rng, 80_000, IDS, 0.2) for _ in range(8)]
    batch = collate(store, windows, 80_000, IDS)
    assert batch.inputs.shape == batch.labels.shape
    for window, labels in zip(windows, batch.labels.tolist(), strict=True):
        size = len(window.labelled.labels)
        assert labels[:size] == window.labelled.labels
        assert set(labels[size:]) <= {IGNORE}


def test_resample_trim_and_pauses():
    tone = np.sin(np.arange(16_000) * 0.2).astype(np.float32)
    quiet = np.zeros(8_000, np.float32)
    assert resample(tone, 0.5).size == 8_000
    assert resample(tone, 1.0) is tone
    assert abs(trim(np.concatenate([quiet, tone, quiet])).size - tone.size) <= 640
    gaps = pauses(np.concatenate([tone, quiet, tone]))
    assert len(gaps) == 1
    assert abs(gaps[0][0] - 16_000) <= 160
    assert trim(quiet).size == 0


def test_error_rates():
    assert error_rate([("kitten", "sitting")]) == pytest.approx(3 / 6)
    assert error_rate([("", "two words"), ("a b", "a b")], words=True) == pytest.approx(2 / 2)
    assert error_rate([("", "ab")]) == 2.0
    assert normalise("¿Dónde  está, O'Neil?") == "dónde está o'neil"
    assert error_rate([("a b", "a c"), ("d", "d")], words=True) == pytest.approx(1 / 3)
    assert error_rate([]) == 0.0


def test_network_computes_what_transformers_computes(tmp_path):
    transformers = pytest.importorskip("transformers")
    geometry = Geometry(vocab_size=IDS.vocab_size, encoder_layers=1, decoder_layers=1, dropout=0.0)
    torch.manual_seed(0)
    network = Whisper(geometry, ctc_labels=3).eval()
    network.load_state_dict({k: v.half().float() for k, v in network.state_dict().items()})
    write_checkpoint(tmp_path, network.state_dict(), geometry, [(0, 0)])
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32
    ).eval()
    mel, ids = torch.randn(1, 80, 3000), torch.tensor([[IDS.sot, 4, 5]])
    with torch.no_grad():
        expected = theirs(input_features=mel, decoder_input_ids=ids).logits
        logits, _ = network(mel, ids)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)

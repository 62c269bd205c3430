"""Chinese answers in one script: the one that a request names, or that of the first text."""

import dataclasses

import pytest

from serve.contract.messages import SegmentReady
from tests.fakes import Echo
from tests.harness import ABLE, Client, TranscriberTests, noise, request
from tests.serve.speech.test_languages import HONG_KONG, SIMPLE, TAIWAN


class Pages:
    """Windows that each say a different text, in the order in which they come."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.seen = tokenizer, texts, {}

    def __call__(self, job):
        number = self.seen.setdefault(job.features.data_ptr(), len(self.seen))
        text = self.texts[min(number, len(self.texts) - 1)]
        begin = self.tokenizer.facts.timestamp_begin
        ((_, ids),) = self.tokenizer.phrases_ids("phrases", [text])
        tokens = (begin, *ids, begin + 50)
        return Echo(self.tokenizer, tokens=tokens)(job)


class TestScripts(TranscriberTests):
    """Over a fake runtime: in its alignments all tokens take equally long."""

    @pytest.mark.parametrize(
        ("language", "written"),
        [*(("zh-TW", TAIWAN), ("zh-HK", HONG_KONG), ("zh-CN", SIMPLE), ("zh", SIMPLE))],
    )
    def test_text_words_tokens_and_segments_have_the_script_that_is_asked_for(
        self, start, tokenizer, language, written
    ):
        transcriber, _ = start(Pages(tokenizer, SIMPLE), ABLE)
        asked = request(language=language, word_timestamps=True, token_logprobs=True)
        client = Client().send(transcriber, asked)
        answer = client.transcript
        (segment,) = answer.segments
        assert answer.text == segment.text == written and answer.language == "zh"
        assert "".join(word.word for word in segment.words) == written
        assert "".join(piece.token for piece in segment.token_logprobs) == written
        assert tokenizer.decode(segment.tokens) == SIMPLE
        told = [event.segment for event in client.events if isinstance(event, SegmentReady)]
        assert tuple(told) == answer.segments

    @pytest.mark.parametrize("first", [SIMPLE, TAIWAN])
    def test_an_answer_has_one_script_that_of_its_first_text(self, start, tokenizer, first):
        transcriber, _ = start(Pages(tokenizer, "OK", first, TAIWAN, SIMPLE), vad="off")
        answer = transcriber.transcribe(
            request(audio=noise(110.0), language="zh", mode="sequential")
        )
        assert [segment.text for segment in answer.segments[:2]] == ["OK", first]
        assert {segment.text for segment in answer.segments[1:]} == {first}

    def test_a_language_among_several_may_name_it(self, start, tokenizer):
        zh = tokenizer.facts.languages["zh"]
        script = Pages(tokenizer, SIMPLE)
        transcriber, _ = start(lambda job: dataclasses.replace(script(job), language=zh), ABLE)
        asked = request(language=None, languages=("en", "zh-TW"))
        assert transcriber.transcribe(asked).text == TAIWAN

    def test_other_languages_stay_as_they_are(self, start, tokenizer):
        transcriber, _ = start(Pages(tokenizer, SIMPLE))
        assert transcriber.transcribe(request(language="ja")).text == SIMPLE

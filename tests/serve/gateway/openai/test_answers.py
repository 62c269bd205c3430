"""What becomes of transcripts."""

import dataclasses
import json

from hypothesis import given
from hypothesis import strategies as st

from serve.contract.messages import Segment
from serve.gateway.openai.answers import Deltas, body
from serve.gateway.openai.fields import read_fields
from serve.speech.windows import join_text
from tests.fakes import transcript


@given(st.lists(st.text(alphabet="ab \n\u3000", max_size=5), max_size=6))
def test_deltas_join_to_the_whole_text(texts):
    deltas = Deltas()
    segments = [Segment(0.0, 1.0, text, (), None, None, 0.0, 1.0) for text in texts]
    assert "".join(map(deltas.next, texts)) == join_text(segments)


def test_json_names_every_language_that_was_heard():
    answer = transcript(" Hallo.", " Hello.", " Tag.")
    segments = [
        dataclasses.replace(segment, language=code)
        for segment, code in zip(answer.segments, ("de", "en", "de"), strict=True)
    ]
    answer = dataclasses.replace(answer, language="de", segments=tuple(segments))
    text, _ = body(answer, read_fields([("model", "whisper")], "transcribe"))
    assert json.loads(text)["languages"] == [{"code": "de"}, {"code": "en"}]

"""What becomes of transcripts."""

from hypothesis import given
from hypothesis import strategies as st

from serve.contract.messages import Segment
from serve.gateway.openai.answers import Deltas
from serve.speech.windows import join_text


@given(st.lists(st.text(alphabet="ab \n\u3000", max_size=5), max_size=6))
def test_deltas_join_to_the_whole_text(texts):
    deltas = Deltas()
    segments = [Segment(0.0, 1.0, text, (), None, None, 0.0, 1.0) for text in texts]
    assert "".join(map(deltas.next, texts)) == join_text(segments)

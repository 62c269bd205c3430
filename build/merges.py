"""The first merge of a tokenizer, which some published files lack.

GPT-2's list of merges begins with a line that names its version. Who takes the first merge for that
line loses it, and words whose pieces it makes are cut otherwise than in training.
"""

import json
from typing import Any


def with_first_merge(tokenizer_json: bytes) -> tuple[bytes, str]:
    """Put the first merge back where it alone is missing.

    Args:
        tokenizer_json: a file of Hugging Face's tokenizers.

    Returns:
        The file, and a sentence on what was put back; as it was, and "", where nothing was.
    """
    content = json.loads(tokenizer_json)
    model = content.get("model") or {}
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if model.get("type") != "BPE" or not vocabulary or not merges:
        return tokenizer_json, ""
    made = {"".join(_pair(merge)) for merge in merges}
    unmade = [token for token in vocabulary if len(token) > 1 and token not in made]
    unmade = [token for token in unmade if not token.startswith("<|")]
    if len(unmade) != 1 or len(unmade[0]) != 2 or not set(unmade[0]) <= set(vocabulary):
        return tokenizer_json, ""
    if vocabulary[unmade[0]] >= vocabulary["".join(_pair(merges[0]))]:
        return tokenizer_json, ""
    left, right = unmade[0]
    first = [left, right] if isinstance(merges[0], list) else f"{left} {right}"
    model["merges"] = [first, *merges]
    repaired = json.dumps(content, ensure_ascii=False).encode()
    return repaired, f"tokenizer.json lacks the first merge, of {left!r} and {right!r}: put back"


def _pair(merge: Any) -> list[str]:
    return merge if isinstance(merge, list) else merge.split(" ")

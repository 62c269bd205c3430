"""Restore the first merge of a tokenizer, which some published files lack.

GPT-2's list of merges begins with a line for the version. Some converters removed a line from lists
that had none, and thereby the first merge. Some words are then tokenized differently than in
training.
"""

import json
from typing import Any


def with_first_merge(tokenizer_json: bytes) -> tuple[bytes, str]:
    """Restore the first merge if it is the only missing one.

    Args:
        tokenizer_json: a file of Hugging Face's tokenizers.

    Returns:
        The file, repaired if needed, and a sentence on the repair; "" if there was none.
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
    return repaired, f"tokenizer.json lacks the first merge, {left!r} + {right!r}: restored"


def _pair(merge: Any) -> list[str]:
    return merge if isinstance(merge, list) else merge.split(" ")

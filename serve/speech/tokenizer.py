"""Convert text to prompt ids, and token ids to text.

This module wraps the `tokenizers` library, which reads tokenizer.json. Special ids come from the
engine's manifest, never from names. A prompt's order is that of OpenAI's `whisper/decoding.py`:

    [<|startofprev|> previous text] <|startoftranscript|> [language task] [<|notimestamps|>]

Thread-safe: nothing changes after the construction.
"""

import functools
from collections.abc import Sequence

import tokenizers

from serve.contract.engine import DETECT_LANGUAGE, Engine
from serve.contract.errors import EngineError, OptionError, shown
from serve.contract.manifest import TOKENIZER_FILE
from serve.contract.messages import Task
from serve.speech.languages import language_code

_NUMERALS = (*"0123456789%$", "Â£")  # the last is £ in byte-level BPE
# Characters to tokenize per token of the limit; text has about four characters per token.
_MAX_TOKEN_CHARS = 32
# A server's runtime and its transcriber open the same file; parsing it takes 0.2 s.
_parsed = functools.lru_cache(maxsize=1)(tokenizers.Tokenizer.from_str)


class Tokenizer:
    """The tokenizer of an engine, from its tokenizer.json.

    Raises:
        EngineError: the file cannot be read, or it is not byte-level BPE.
    """

    def __init__(self, engine: Engine) -> None:
        path, text = engine.path / TOKENIZER_FILE, engine.load_tokenizer()
        try:
            self._pieces = _parsed(text)
        except Exception as error:  # the library raises no narrower type
            raise EngineError(f"cannot read {path}: {error}; build the engine again") from error
        if self._pieces.decoder is None:
            raise EngineError(
                f"{path} has no decoder; expected byte-level BPE: build the engine again"
            )
        self.facts = engine.manifest.tokenizer
        """The special ids and suppression lists of the manifest."""
        self.n_vocab = engine.manifest.dims.n_vocab
        """The number of ids, including timestamps and other special ids."""
        self.text_limit = engine.manifest.dims.n_text_ctx // 2 - 1
        """The maximum text ids in a prompt: half the context minus <|startofprev|>."""
        self._codes = {token: code for code, token in self.facts.languages.items()}

    @property
    def languages(self) -> frozenset[str]:
        """The engine's language codes; only "en" if it is English-only."""
        return frozenset(self.facts.languages or {"en"})

    @property
    def numerals(self) -> tuple[int, ...]:
        """The ids of text tokens with a digit, %, $ or £, in order."""
        vocabulary = self._pieces.get_vocab(with_added_tokens=False)
        found = (id for piece, id in vocabulary.items() if any(mark in piece for mark in _NUMERALS))
        return tuple(sorted(id for id in found if id < self.facts.eot))

    def language_ids(self, languages: Sequence[str]) -> tuple[int, ...]:
        """Return the tokens of languages, each once.

        Args:
            languages: codes, English names or tags such as en-US, in any case.

        Raises:
            OptionError: a language is unknown.
        """
        codes = dict.fromkeys(map(self._known_language, languages))
        return tuple(self.facts.languages[code] for code in codes)

    def language_code(self, token_id: int) -> str:
        """Return the code of a language token.

        Raises:
            KeyError: the id is not a language token.
        """
        return self._codes[token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special and timestamp ids are dropped.

        Ids may begin or end inside a character: invalid UTF-8 becomes U+FFFD.
        """
        text = [token for token in ids if 0 <= token < self.facts.eot]
        return self._pieces.decode(text, skip_special_tokens=False)

    def special_name(self, token_id: int) -> str:
        """Return the name of a special token, such as <|startoftranscript|>.

        Raises:
            EngineError: tokenizer.json has no such token.
        """
        name = self._pieces.id_to_token(token_id)
        if name is None:
            raise EngineError(
                f"{TOKENIZER_FILE} has no token {token_id}, which the manifest names; "
                "build the engine again"
            )
        return str(name)

    def prompt_ids(self, language: str | None, task: Task, timestamps: bool) -> tuple[int, ...]:
        """Return the ids of a prompt from start-of-transcript on.

        Args:
            language: code, English name or tag, in any case; None inserts DETECT_LANGUAGE, which
                the runtime replaces by the detected language.
            task: "transcribe", or "translate" into English.
            timestamps: whether timestamp tokens may follow.

        Raises:
            OptionError: the language is unknown, or the engine does not support the task.
        """
        ids = (self.facts.sot, *self._language_and_task(language, task))
        return ids if timestamps else (*ids, self.facts.no_timestamps)

    def previous_text(self, prompt: str) -> tuple[int, ...]:
        """Return the ids of the text before the audio; none if it is blank.

        Only the last `text_limit` ids of a long text are used, as in OpenAI's decoder. The text is
        truncated before it is tokenized.

        Raises:
            OptionError: the text holds special tokens.
        """
        text = prompt.strip()[-self.text_limit * _MAX_TOKEN_CHARS :]
        return self._encoded("prompt", text)[-self.text_limit :]

    def text_ids(self, option: str, text: str, limit: int) -> tuple[int, ...]:
        """Return the ids of a text that must not be truncated; none if it is blank.

        Args:
            option: the option's name, for errors.
            text: the client's text.
            limit: the maximum number of ids.

        Raises:
            OptionError: the text holds special tokens or is too long.
        """
        text = text.strip()
        ids = self._encoded(option, text[: (limit + 1) * _MAX_TOKEN_CHARS])
        if len(ids) > limit:
            raise OptionError(
                f"{option} has {len(text)} characters, more than {limit} tokens; send less text"
            )
        return ids

    def phrases_ids(self, option: str, phrases: Sequence[str]) -> list[list[tuple[int, ...]]]:
        """Return the ids of stripped phrases, each after a space and at the beginning of a text.

        Raises:
            OptionError: a phrase holds special tokens.
        """
        texts = [form for phrase in phrases for form in (" " + phrase, phrase)]
        encoded = self._pieces.encode_batch_fast(texts, add_special_tokens=False)
        ids = [self._checked(option, encoding) for encoding in encoded]
        return [list(tokenizations) for tokenizations in zip(ids[::2], ids[1::2], strict=True)]

    def _encoded(self, option: str, text: str) -> tuple[int, ...]:
        """Return the ids of stripped text after a space, like a word within a text."""
        if not text:
            return ()
        return self._checked(option, self._pieces.encode(" " + text, add_special_tokens=False))

    def _checked(self, option: str, encoded: tokenizers.Encoding) -> tuple[int, ...]:
        """Return the ids of an encoded text.

        Raises:
            OptionError: the text holds special tokens.
        """
        ids = tuple(encoded.ids)
        if ids and (last := max(ids)) >= self.facts.eot:
            name = self._pieces.id_to_token(last)
            raise OptionError(f"{option} holds the special token {name}; expected plain text")
        return ids

    def _language_and_task(self, language: str | None, task: Task) -> list[int]:
        facts = self.facts
        code = None if language is None else self._known_language(language)
        tasks = {"transcribe": facts.transcribe, "translate": facts.translate}
        if task not in tasks:
            raise OptionError(f"task {shown(task)} is unknown; expected one of {', '.join(tasks)}")
        if not facts.multilingual:
            if task == "translate":
                raise OptionError(
                    "task 'translate' needs a multilingual engine, but this engine is English-only"
                )
            return []
        task_id = tasks[task]
        if task_id is None:
            raise OptionError(f"task {task!r} is not supported by this engine")
        return [DETECT_LANGUAGE if code is None else facts.languages[code], task_id]

    def _known_language(self, language: str) -> str:
        """Return the code of a language of this engine."""
        code = language_code(language)
        if code in self.languages:
            return code
        if not self.facts.multilingual:
            raise OptionError(f"language {shown(language)}: this engine is English-only")
        found = "unknown" if code is None else f"not among this engine's {len(self.languages)}"
        raise OptionError(
            f"language {shown(language)} is {found}; expected a code such as 'en' or its name"
        )

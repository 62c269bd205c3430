"""Prompt ids for a request, and text from token ids.

Wraps the `tokenizers` library's reader of tokenizer.json; special ids come from the engine's
manifest, never from names. The order of a prompt is that of OpenAI's `whisper/decoding.py`:

    [<|startofprev|> previous text] <|startoftranscript|> [language task] [<|notimestamps|>]

Thread-safe: nothing changes after `open`.
"""

import difflib
from collections.abc import Sequence

import tokenizers

from serve.contract.engine import DETECT_LANGUAGE, TOKENIZER_FILE, Engine, TokenizerFacts
from serve.contract.errors import EngineError, OptionError, shown
from serve.contract.messages import Task
from serve.speech.languages import TO_LANGUAGE_CODE, language_code

_MAX_LANGUAGE_CHARS = 60
_CLOSE = 0.75  # of a language's name to what may be a slip of it
_NUMERALS = (*"0123456789%$", "Â£")  # the last as byte-level BPE writes £
# Characters that are looked at for each token that counts; text has about four a token.
_MAX_TOKEN_CHARS = 32


class Tokenizer:
    """One engine's tokenizer."""

    def __init__(
        self, pieces: tokenizers.Tokenizer, facts: TokenizerFacts, n_text_ctx: int, n_vocab: int
    ) -> None:
        """Use `Tokenizer.open`."""
        self._pieces = pieces
        self._facts = facts
        self._n_vocab = n_vocab
        self._codes = {token: code for code, token in facts.languages.items()}
        self._text_limit = n_text_ctx // 2 - 1

    @classmethod
    def open(cls, engine: Engine) -> "Tokenizer":
        """Read the engine's tokenizer.json.

        Raises:
            EngineError: it cannot be read, or its special ids are not those of the manifest.
        """
        path, text = engine.path / TOKENIZER_FILE, engine.load_tokenizer()
        try:
            pieces = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise EngineError(f"cannot read {path}: {error}; build the engine again") from error
        facts = engine.manifest.tokenizer
        if pieces.decoder is None:
            raise EngineError(f"{path} has no decoder, expected byte-level BPE")
        expected = {"<|endoftext|>": facts.eot, "<|startoftranscript|>": facts.sot}
        expected |= {f"<|{code}|>": token for code, token in facts.languages.items()}
        for name, token in expected.items():
            actual = pieces.token_to_id(name)
            if actual != token:
                raise EngineError(
                    f"{path}: {name} has id {actual}, the manifest says {token}; "
                    "build the engine again"
                )
        dims = engine.manifest.dims
        return cls(pieces, facts, dims.n_text_ctx, dims.n_vocab)

    @property
    def facts(self) -> TokenizerFacts:
        """Special ids and suppression lists, as the manifest states them."""
        return self._facts

    @property
    def n_vocab(self) -> int:
        """The number of ids, timestamps and other special ones among them."""
        return self._n_vocab

    @property
    def text_limit(self) -> int:
        """Ids of text that a prompt may hold: half a context without the mark before them."""
        return self._text_limit

    @property
    def languages(self) -> frozenset[str]:
        """Codes of the languages that the engine knows; only "en" if it is English-only."""
        return frozenset(self._facts.languages or {"en"})

    @property
    def numerals(self) -> tuple[int, ...]:
        """Ids of text that holds a digit, %, $ or £, in order."""
        vocabulary = self._pieces.get_vocab(with_added_tokens=False)
        found = (id for piece, id in vocabulary.items() if any(mark in piece for mark in _NUMERALS))
        return tuple(sorted(id for id in found if id < self._facts.eot))

    def language_ids(self, languages: Sequence[str]) -> tuple[int, ...]:
        """Return the tokens of languages, each once.

        Args:
            languages: codes, English names or tags such as en-US, in any case.

        Raises:
            OptionError: one is unknown.
        """
        codes = dict.fromkeys(map(self._known_language, languages))
        return tuple(self._facts.languages[code] for code in codes)

    def language_code(self, token_id: int) -> str:
        """Return the code of a language token.

        Raises:
            KeyError: the id is not a language token.
        """
        return self._codes[token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special and timestamp ids are dropped.

        Ids may end, or begin, inside a character: what is not UTF-8 becomes U+FFFD.
        """
        text = [token for token in ids if 0 <= token < self._facts.eot]
        return self._pieces.decode(text, skip_special_tokens=False)

    def special_name(self, token_id: int) -> str:
        """Return a special token as it is written in text, such as <|startoftranscript|>.

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

    def prompt_ids(
        self, language: str | None, task: Task, timestamps: bool, prompt: str
    ) -> tuple[int, ...]:
        """Return the ids that a window's decoding begins with.

        Args:
            language: code, English name or tag, in any case; None puts DETECT_LANGUAGE where the
                runtime must put the language that it finds.
            task: "transcribe", or "translate" into English.
            timestamps: whether timestamp tokens may follow.
            prompt: text that precedes the audio; see `previous_text`.

        Raises:
            OptionError: the language is unknown, the engine cannot do what is asked, or the
                prompt holds special tokens.
        """
        facts = self._facts
        before = self.previous_text(prompt)
        ids = [facts.sot_prev, *before, facts.sot] if before else [facts.sot]
        ids += self._language_and_task(language, task)
        if not timestamps:
            ids.append(facts.no_timestamps)
        return tuple(ids)

    def previous_text(self, prompt: str) -> tuple[int, ...]:
        """Return the ids of the text that precedes the audio; none where it is blank.

        Of a long one the last `text_limit` ids are used, as OpenAI's decoder does, and no more
        text is looked at than those can stand for.

        Raises:
            OptionError: it holds special tokens.
        """
        text = prompt.strip()[-self._text_limit * _MAX_TOKEN_CHARS :]
        return self._encoded("prompt", text)[-self._text_limit :]

    def text_ids(self, option: str, text: str, limit: int) -> tuple[int, ...]:
        """Return the ids of a text of which nothing may be left out; none where it is blank.

        Args:
            option: its name, for errors.
            text: what a client wrote.
            limit: the most ids that it may have.

        Raises:
            OptionError: it holds special tokens or is too long.
        """
        text = text.strip()
        ids = self._encoded(option, text[: (limit + 1) * _MAX_TOKEN_CHARS])
        if len(ids) > limit:
            raise OptionError(
                f"{option} has {len(text)} characters, more than {limit} tokens; send less text"
            )
        return ids

    def phrases_ids(self, option: str, phrases: Sequence[str]) -> list[list[tuple[int, ...]]]:
        """Ids of each of some stripped phrases, behind a space and at the beginning of a text.

        Raises:
            OptionError: one holds special tokens.
        """
        texts = [way for phrase in phrases for way in (" " + phrase, phrase)]
        encoded = self._pieces.encode_batch_fast(texts, add_special_tokens=False)
        ids = [self._checked(option, one) for one in encoded]
        return [list(ways) for ways in zip(ids[::2], ids[1::2], strict=True)]

    def _encoded(self, option: str, text: str) -> tuple[int, ...]:
        """Return the ids of stripped text, which begins with a space as words do."""
        if not text:
            return ()
        return self._checked(option, self._pieces.encode(" " + text, add_special_tokens=False))

    def _checked(self, option: str, encoded: tokenizers.Encoding) -> tuple[int, ...]:
        """Return the ids of a text.

        Raises:
            OptionError: it holds special tokens.
        """
        ids = tuple(encoded.ids)
        if ids and (last := max(ids)) >= self._facts.eot:
            name = self._pieces.id_to_token(last)
            raise OptionError(f"{option} holds the special token {name}; expected plain text")
        return ids

    def _language_and_task(self, language: str | None, task: Task) -> list[int]:
        facts = self._facts
        code = None if language is None else self._known_language(language)
        tasks = {"transcribe": facts.transcribe, "translate": facts.translate}
        if task not in tasks:
            raise OptionError(f"task {shown(task)} is unknown; expected one of {', '.join(tasks)}")
        if not facts.multilingual:
            if task == "translate":
                raise OptionError("task 'translate' needs a multilingual engine; this one is not")
            return []
        task_id = tasks[task]
        if task_id is None:
            raise OptionError(f"task {task!r} is not known to this engine")
        return [DETECT_LANGUAGE if code is None else facts.languages[code], task_id]

    def _known_language(self, language: str) -> str:
        """Return the code of a language that this engine knows."""
        code, known = language_code(language), self.languages
        if code in known:
            return code
        if code is not None and not self._facts.multilingual:
            raise OptionError(f"language {shown(language)}: this engine is English-only")
        if code is not None:
            raise OptionError(f"language {shown(language)} is not among this engine's {len(known)}")
        words = [word for word, its_code in TO_LANGUAGE_CODE.items() if its_code in known]
        key = language[:_MAX_LANGUAGE_CHARS].strip().lower()
        near = difflib.get_close_matches(key, words, n=1, cutoff=_CLOSE)
        hint = f"did you mean {near[0]!r}?" if near else "expected a code such as 'en' or its name"
        raise OptionError(f"language {shown(language)} is unknown; {hint}")

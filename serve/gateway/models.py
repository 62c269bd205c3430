"""Which models there are, and by which names clients ask for them.

There is one model, the config's product. OpenAI's clients write its name, an alias, or what fits a
pattern among these. KServe's write `whisper`, and `whisper_stream` for answers segment by segment,
or any name that OpenAI's may write, and behind it `_stream` for such answers.
"""

import dataclasses
import re

from serve.contract.config import Config
from serve.contract.errors import shown
from serve.gateway import errors
from serve.gateway.errors import field_error
from serve.wire.tensors import MODEL, STREAM_MODEL

_VERSIONS = ("", "1")
_STREAM = "_stream"
_MAX_CHARS = 200  # of a name that may fit a pattern


@dataclasses.dataclass(frozen=True)
class Target:
    """The model that a request is for."""

    model: str  # a product's name
    segments: bool  # whether it answers segment by segment
    client_name: str = ""  # as KServe's client has called it


class Models:
    """The names of a config's product."""

    def __init__(self, config: Config) -> None:
        own, aliases = config.name, config.server.model_aliases
        self.default = own
        """The product."""
        self.patterns = tuple(alias for alias in aliases if "*" in alias)
        """Texts that fit one of them OpenAI's clients may write as well; * is any text."""
        exact = [alias for alias in aliases if alias not in self.patterns]
        self.names = tuple(dict.fromkeys((own, *exact)))
        """Names that OpenAI's clients may write, as far as they can be listed."""
        anything = "|".join(
            ".*".join(map(re.escape, pattern.lower().split("*"))) for pattern in self.patterns
        )
        self._any = re.compile(anything if self.patterns else "(?!)")

    def find(self, name: str | None) -> str | None:
        """Find the product of this name; None where there is none, the default without a name."""
        if name is None or name in self.names:
            return self.default
        fits = len(name) <= _MAX_CHARS and self._any.fullmatch(name.lower())
        return self.default if fits else None

    def named(self, name: str | None) -> str:
        """Find the product that `model` means to OpenAI's API.

        Raises:
            ApiError: there is no model of this name.
        """
        model = self.find(name)
        if model is None:
            raise field_error(
                "model",
                f"no model {shown(name)}; there are {', '.join(self.names + self.patterns)} "
                "(server.model_aliases adds names)",
                "model_not_found",
                "not_found",
            )
        return model

    def target(self, name: str, version: str) -> Target:
        """Find what KServe calls by this name.

        Raises:
            ApiError: there is no such model, or no such version of it.
        """
        if name in (MODEL, STREAM_MODEL):
            target = Target(self.default, name == STREAM_MODEL, name)
        elif (model := self.find(name)) is not None:
            target = Target(model, False, name)
        elif name.endswith(_STREAM) and (model := self.find(name.removesuffix(_STREAM))):
            target = Target(model, True, name)
        else:
            others = "".join(f", {product}, {product}{_STREAM}" for product in self.names)
            raise errors.not_found(
                f"no model {shown(name)}; there are {MODEL}, {STREAM_MODEL}{others}"
            )
        if version not in _VERSIONS:
            raise errors.not_found(f"no version {shown(version)} of {name}; there is 1")
        return target

"""The names by which clients ask for the model.

There is one model, the config's product. Clients of OpenAI's API send its name, an alias, or a name
that matches a pattern among the aliases. Clients of KServe send `whisper`, or `whisper_stream` for
answers segment by segment, or any name of OpenAI's API, with `_stream` appended for such answers.
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
_MAX_CHARS = 200  # of a name that may match a pattern


@dataclasses.dataclass(frozen=True)
class Target:
    """The model that a request is for."""

    model: str  # a product's name
    segments: bool  # whether it answers segment by segment
    client_name: str = ""  # the name that a client of KServe sent


class Models:
    """The names of a configuration's product."""

    def __init__(self, config: Config) -> None:
        aliases = config.server.model_aliases
        self.default = config.name
        """The product."""
        self.patterns = tuple(alias for alias in aliases if "*" in alias)
        """Patterns of further names, in which * is any text."""
        exact = [alias for alias in aliases if alias not in self.patterns]
        self.names = tuple(dict.fromkeys((self.default, *exact)))
        """The names of OpenAI's API that can be listed."""
        texts = (pattern.lower().split("*") for pattern in self.patterns)
        self._expressions = [".*".join(map(re.escape, between)) for between in texts]

    def named(self, name: str | None) -> str:
        """Resolve the field `model` of OpenAI's API to the name of the config's product.

        Raises:
            ApiError: 404, no model has this name.
        """
        if name is not None and not self._has(name):
            names = ", ".join(self.names + self.patterns)
            message = f"no model {shown(name)}; there are {names} (server.model_aliases adds names)"
            raise field_error("model", message, "model_not_found", "not_found")
        return self.default

    def target(self, name: str, version: str, streamed: bool = True) -> Target:
        """Return the model that a name and version of KServe mean.

        Args:
            name: the model's name.
            version: its version; empty: any.
            streamed: whether several answers can be sent.

        Raises:
            ApiError: 404, there is no such model or version; 400, it sends several answers.
        """
        segments = name == STREAM_MODEL
        if name not in (MODEL, STREAM_MODEL) and not self._has(name):
            segments = name.endswith(_STREAM) and self._has(name.removesuffix(_STREAM))
            if not segments:
                others = "".join(f", {known}, {known}{_STREAM}" for known in self.names)
                names = f"{MODEL}, {STREAM_MODEL}{others}"
                raise errors.not_found(f"no model {shown(name)}; there are {names}")
        if version not in _VERSIONS:
            raise errors.not_found(f"no version {shown(version)} of {name}; there is 1")
        if segments and not streamed:
            whole = name.removesuffix(_STREAM)
            raise errors.invalid(f"{name} answers by a stream (ModelStreamInfer); here ask {whole}")
        return Target(self.default, segments, name)

    def _has(self, name: str) -> bool:
        matches = (re.fullmatch(pattern, name.lower()) for pattern in self._expressions)
        return name in self.names or (len(name) <= _MAX_CHARS and any(matches))

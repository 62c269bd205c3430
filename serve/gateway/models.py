"""Which models there are, and by which names clients ask for them.

A model is a product: the config's own, or one that its upstreams serve. OpenAI's clients write its
name or, for the config's own, an alias. KServe's write `whisper` for the config's own and
`whisper_stream` for its answers segment by segment, or any name that OpenAI's may write, and behind
it `_stream` for such answers.
"""

import dataclasses

from serve.config import Config
from serve.errors import ConfigError, shown
from serve.gateway import refusals
from serve.triton.wire import MODEL, STREAM_MODEL

_VERSIONS = ("", "1")
_STREAM = "_stream"


@dataclasses.dataclass(frozen=True)
class Target:
    """The model that a request is for."""

    model: str  # a product's name
    segments: bool  # whether it answers segment by segment
    asked: str = ""  # as KServe's client has called it

    @property
    def name(self) -> str:
        """What the gateway of another Earshot calls it, by KServe."""
        return f"{self.model}{_STREAM}" if self.segments else self.model

    @property
    def triton_name(self) -> str:
        """What the Triton of an Earshot calls it."""
        return STREAM_MODEL if self.segments else MODEL


class Models:
    """All of a config.

    Raises:
        ConfigError: a name means two of them.
    """

    def __init__(self, config: Config) -> None:
        own, aliases = config.name, config.server.model_aliases
        others = [name for upstream in config.upstreams for name in upstream.models]
        self.default = own
        self.all = tuple(dict.fromkeys((own, *others)))
        """The products, of which the first is the default."""
        self.names = tuple(dict.fromkeys((own, *aliases, *others)))
        """What OpenAI's clients may write."""
        if MODEL in others and own != MODEL:
            raise ConfigError(
                f"upstreams have a model {MODEL}, by which KServe's clients mean {own}; give it "
                "another name there"
            )
        self._aliases = dict.fromkeys(aliases, own)

    def find(self, name: str | None) -> str | None:
        """The product of this name; None where there is none, the default without a name."""
        if name is None:
            return self.default
        return self._aliases.get(name, name) if name in self.names else None

    def target(self, name: str, version: str = "") -> Target:
        """What KServe calls by this name.

        Raises:
            Refusal: there is no such model, or no such version of it.
        """
        if name in (MODEL, STREAM_MODEL):
            found = Target(self.default, name == STREAM_MODEL, name)
        elif (model := self.find(name)) is not None:
            found = Target(model, False, name)
        elif name.endswith(_STREAM) and (model := self.find(name.removesuffix(_STREAM))):
            found = Target(model, True, name)
        else:
            others = "".join(f", {one}, {one}{_STREAM}" for one in self.names)
            raise refusals.not_found(
                f"no model {shown(name)}; there are {MODEL}, {STREAM_MODEL}{others}"
            )
        if version not in _VERSIONS:
            raise refusals.not_found(f"no version {shown(version)} of {name}; there is 1")
        return found

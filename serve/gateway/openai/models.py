"""The models that OpenAI's API names: the product of the config, and its aliases."""

import time
from typing import Any

from serve.config import Config
from serve.errors import shown
from serve.gateway.openai.errors import FieldRefusal


class Models:
    """What `model` may be, and what /v1/models tells of it."""

    def __init__(self, config: Config) -> None:
        self._names = tuple(dict.fromkeys((config.name, *config.server.model_aliases)))
        self._created = int(time.time())

    def check(self, name: str) -> None:
        """Refuse what is not served.

        Raises:
            Refusal: there is no model of this name.
        """
        if name not in self._names:
            raise FieldRefusal(
                "model",
                f"no model {shown(name)}; there are {', '.join(self._names)} "
                "(server.model_aliases adds names)",
                "model_not_found",
                "NOT_FOUND",
            )

    def one(self, name: str) -> dict[str, Any]:
        """A model as OpenAI describes it.

        Raises:
            Refusal: there is no model of this name.
        """
        self.check(name)
        return {"id": name, "object": "model", "created": self._created, "owned_by": "earshot"}

    def all(self) -> dict[str, Any]:
        """The list of them."""
        return {"object": "list", "data": [self.one(name) for name in self._names]}

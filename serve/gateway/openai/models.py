"""The models as OpenAI's API names and lists them."""

import time
from typing import Any

from serve.contract.errors import shown
from serve.gateway.models import Models
from serve.gateway.refusals import FieldRefusal

_CREATED = int(time.time())


def named(models: Models, name: str | None) -> str:
    """The product that `model` means.

    Raises:
        Refusal: there is no model of this name.
    """
    model = models.find(name)
    if model is None:
        raise FieldRefusal(
            "model",
            f"no model {shown(name)}; there are {', '.join(models.names + models.patterns)} "
            "(server.model_aliases adds names)",
            "model_not_found",
            "not_found",
        )
    return model


def one(models: Models, name: str) -> dict[str, Any]:
    """A model as OpenAI describes it.

    Raises:
        Refusal: there is no model of this name.
    """
    named(models, name)
    return {"id": name, "object": "model", "created": _CREATED, "owned_by": "earshot"}


def listed(models: Models) -> dict[str, Any]:
    """The list of them."""
    return {"object": "list", "data": [one(models, name) for name in models.names]}

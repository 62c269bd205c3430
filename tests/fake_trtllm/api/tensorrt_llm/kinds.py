"""What a field of the stand-in takes: exactly what it is declared as.

The real classes of settings are pydantic's, and those of sampling hand their fields to the
bindings; here, as in the bindings, a bool is no int and an int no float.
"""

import dataclasses
import typing

EXACT = (bool, int, float, str)


def check(made, error):
    """Raise `error` where a field of a dataclass holds another kind of value."""
    for name, declared in typing.get_type_hints(type(made)).items():
        if name in {field.name for field in dataclasses.fields(made)}:
            check_one(f"{type(made).__name__}.{name}", getattr(made, name), declared, error)


def check_one(name, value, declared, error):
    """Raise `error` where a value is of none of the kinds that an annotation names."""
    kinds = typing.get_args(declared) or (declared,)
    if not any(type(value) is kind if kind in EXACT else isinstance(value, kind) for kind in kinds):
        raise error(f"{name} = {value!r}; expected {declared}")

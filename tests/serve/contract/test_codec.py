"""JSON and TOML against types: what is read, what is refused and in which words."""

import dataclasses
import math
from typing import Annotated, Literal

import pytest
from pydantic import Field

from serve.contract.codec import from_json, from_table, to_json
from serve.contract.errors import ConfigError, EngineError


@dataclasses.dataclass(frozen=True)
class Leg:
    length: Annotated[float, Field(gt=0)]
    joints: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Beast:
    name: str
    legs: tuple[Leg, ...] = ()
    eyes: dict[str, Leg] = dataclasses.field(default_factory=dict)
    tail: Leg | None = None
    kind: Literal["cat", "dog"] = "cat"
    tame: bool = True
    weight: float = 0.0
    pair: tuple[int, int] = (0, 0)
    age: Annotated[int, Field(ge=0, lt=10)] = 0


def read(text, **options):
    return from_json(Beast, text, "zoo.json", **options)


def test_everything_comes_back():
    beast = Beast(
        "Ümit", (Leg(0.1, (1, 2)), Leg(2.0)), {"left": Leg(1e-9)}, Leg(math.inf), "dog", False
    )
    assert read(to_json(beast)) == beast
    assert read(to_json(beast, indent=2).encode()) == beast
    assert "Ümit" in to_json(beast)
    assert from_json(tuple[Beast, ...], to_json([beast]), "zoo.json") == (beast,)


def test_a_score_that_is_no_number_comes_back():
    """Not as null, which no field of numbers takes."""
    assert math.isnan(read(to_json(Beast("a", weight=math.nan))).weight)


def test_a_number_with_a_point_may_be_written_without():
    length = read('{"name": "a", "legs": [{"length": 3}]}').legs[0].length
    assert (length, type(length)) == (3.0, float)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('"tial": 1', "zoo.json: unknown key 'tial'; did you mean 'tail'?"),
        ('"tail": {"length": 1, "joint": 1}', "tail: unknown key 'joint'; did you mean 'joints'?"),
        ('"tail": 3', "zoo.json: tail = 3; expected a table"),
        ('"tail": {"length": "1"}', "tail.length = '1'; expected a number"),
        ('"tail": {"length": 1, "joints": [1, true]}', "joints[1] = True; expected an integer"),
        ('"kind": "cow"', "zoo.json: kind = 'cow'; expected 'cat' or 'dog'"),
        ('"tame": 1', "zoo.json: tame = 1; expected true or false"),
        ('"pair": [1, 2, 3]', "zoo.json: pair = [1, 2, 3]; expected at most 2 of them"),
        ('"age": 1e400', "zoo.json: age = inf; expected an integer"),
        ('"age": -1', "zoo.json: age = -1; expected at least 0"),
    ],
)
def test_what_is_wrong_is_named(fields, message):
    with pytest.raises(ConfigError) as caught:
        read(f'{{"name": "a", {fields}}}')
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "zoo.json is not JSON: EOF while parsing an object at line 1 column 1"),
        (b'{"name": "\xff"}', "zoo.json is not JSON: "),
        ("3", "zoo.json holds 3; expected a table"),
        ("{}", "zoo.json: name is missing; has no keys"),
    ],
)
def test_what_is_no_beast_at_all(text, message):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "value",
    [
        {"name": "a", "tame": "x" * 10_000},
        {"name": "a", "x" * 2_000_000: 1},
        {"tail": {f"{i}": 1 for i in range(300_000)}},
    ],
)
def test_nor_are_long_keys_or_many_echoed_whole(value):
    with pytest.raises(ConfigError) as caught:
        read(to_json(value))
    assert len(str(caught.value)) < 500


def test_the_caller_chooses_the_error_and_what_to_do():
    with pytest.raises(EngineError, match=r"^zoo.json: name is missing; has no keys; feed it$"):
        read("{}", error=EngineError, advice="feed it")


def test_surplus_keys_are_passed_over_where_asked():
    assert read('{"name": "a", "x": 1, "tail": {"length": 1, "y": 2}}', extra="ignore") == Beast(
        "a", tail=Leg(1.0)
    )


def test_tables_are_read_as_json_is():
    assert from_table(Beast, {"name": "a", "pair": [1, 2]}, "zoo.toml") == Beast("a", pair=(1, 2))
    with pytest.raises(ConfigError, match=r"zoo\.toml: age = 'old'; expected an integer"):
        from_table(Beast, {"name": "a", "age": "old"}, "zoo.toml")

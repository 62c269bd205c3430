"""The Spanish grammar: slots and templates over `words_es.py`."""

import random

from build.demo.maker import words_es as words
from build.demo.maker.grammar import Slot, capitalise, chooser, digits, fill, salad, weighted
from build.demo.maker.numbers import spanish_number, spanish_time

_VOWELS = "aeiouáéíóú"
_PLAIN = str.maketrans("áéíóú", "aeiou")
_FEMININE = set(words.FEMININE) | {"cantante"}


def plural(noun: str) -> str:
    """The noun's or adjective's plural."""
    if noun[-1] in "aeoiuáéíú" and not noun.endswith(("í", "ú")):
        return noun + "s"
    if noun.endswith("z"):
        return noun[:-1] + "ces"
    if noun.endswith("s"):
        return noun if noun[-2] in "aeiou" else noun[:-2] + noun[-2:].translate(_PLAIN) + "es"
    if noun.endswith(("ón", "ín", "án", "én", "ún")):
        return noun[:-2] + noun[-2:].translate(_PLAIN) + "es"
    return noun + "es"


def feminine(adjective: str) -> str:
    """The adjective's feminine form."""
    return adjective[:-1] + "a" if adjective.endswith("o") else adjective


_AR_ENDINGS = "o a amos an ó aron aba aban ará arán ando ado".split()
_ER_ENDINGS = "o e emos en ió ieron ía ían erá erán iendo ido".split()
_IR_ENDINGS = "o e imos en ió ieron ía ían irá irán iendo ido".split()
_FORMS = "yo él nosotros ellos pasado pasados era eran será serán ando ado".split()


def conjugate(infinitive: str) -> dict[str, str]:
    """Present, past, imperfect, future, gerund and participle of a regular verb."""
    stem = infinitive[:-2]
    if infinitive.endswith("ar"):
        return {form: stem + end for form, end in zip(_FORMS, _AR_ENDINGS, strict=True)}
    endings = _ER_ENDINGS if infinitive.endswith("er") else _IR_ENDINGS
    return {form: stem + end for form, end in zip(_FORMS, endings, strict=True)}


_INFINITIVES = words.AR_VERBS + words.ER_IR_VERBS
_REGULAR = [verb for verb in _INFINITIVES if verb not in words.SKIP_VERBS]
_CONJUGATED = [conjugate(verb) for verb in _REGULAR]
_NOUNS = words.MASCULINE + words.FEMININE
_ALL_WORDS = sorted(
    {
        *_NOUNS, *(plural(noun) for noun in _NOUNS), *words.ADVERBS, *_INFINITIVES,
        *(form for verb in _CONJUGATED for form in verb.values()),
        *words.ADJECTIVES, *(feminine(adjective) for adjective in words.ADJECTIVES),
        *(plural(adjective) for adjective in words.ADJECTIVES),
    }
)  # fmt: skip


def _form(name: str) -> Slot:
    return chooser([verb[name] for verb in _CONJUGATED])


def _definite(noun: str) -> str:
    if noun in _FEMININE and noun not in ("agua", "águila"):
        return f"la {noun}"
    return f"el {noun}"


def _the(rng: random.Random) -> str:
    return _definite(rng.choice(_NOUNS))


def _the_adjective(rng: random.Random) -> str:
    noun, adjective = rng.choice(_NOUNS), rng.choice(words.ADJECTIVES)
    return f"{_definite(noun)} {feminine(adjective) if noun in _FEMININE else adjective}"


def _a_noun(rng: random.Random) -> str:
    noun, adjective = rng.choice(_NOUNS), rng.choice(words.ADJECTIVES)
    female = noun in _FEMININE
    phrase = f"{'una' if female else 'un'} {noun}"
    return (
        f"{phrase} {feminine(adjective) if female else adjective}" if rng.random() < 0.4 else phrase
    )


def _plurals(rng: random.Random) -> str:
    noun = rng.choice(_NOUNS)
    determiners = (
        "las unas muchas algunas estas" if noun in _FEMININE else "los unos muchos algunos estos"
    )
    return f"{rng.choice(determiners.split())} {plural(noun)}"


def _counted(rng: random.Random) -> str:
    noun, value = rng.choice(words.MASCULINE), rng.choice([rng.randint(2, 20), rng.randint(2, 99)])
    number = spanish_number(value)
    number = number[:-1] if number.endswith(" uno") else number.replace("veintiuno", "veintiún")
    return f"{number} {plural(noun)}"


def _person(rng: random.Random) -> str:
    return _definite(rng.choice(words.PEOPLE))


def _big_number(rng: random.Random) -> str:
    tens = 10 * rng.choice([rng.randint(2, 99), rng.randint(20, 999), rng.randint(200, 9999)])
    return spanish_number(tens + rng.choice([0, 0, 2, 5, 7]))


def _time(rng: random.Random) -> str:
    minute = rng.choice([0, 15, 30, 5 * rng.randint(0, 11), rng.randint(1, 59)])
    return spanish_time(rng.randint(1, 12), minute)


def _date(rng: random.Random) -> str:
    return f"el {spanish_number(rng.randint(2, 31))} de {rng.choice(words.MONTHS)}"


def _name_list(rng: random.Random) -> str:
    names = rng.sample(words.FIRST_NAMES, 3)
    last = f"e {names[2]}" if names[2].startswith(("I", "Hi")) else f"y {names[2]}"
    return f"{names[0]}, {names[1]} {last}"


SLOTS: dict[str, Slot] = {
    "noun": chooser(_NOUNS),
    "the": _the,
    "theadj": _the_adjective,
    "a": _a_noun,
    "plurals": _plurals,
    "counted": _counted,
    "who": _person,
    "adj": chooser(words.ADJECTIVES),
    "adjs": chooser([plural(adjective) for adjective in words.ADJECTIVES]),
    "adv": chooser(words.ADVERBS),
    "first": chooser(words.FIRST_NAMES),
    "last": chooser(words.LAST_NAMES),
    "place": chooser([place.replace("_", " ") for place in words.PLACES]),
    "day": chooser(words.DAYS),
    "month": chooser(words.MONTHS),
    "unit": chooser(words.UNITS),
    "rel": chooser(words.RELATIONS),
    "hey": chooser(words.EXCLAMATIONS),
    "inf": chooser(_INFINITIVES),
    "moves": chooser([part for part in words.PHRASES_MOVE.replace("\n", "|").split("|") if part]),
    "yo": _form("yo"),
    "él": _form("él"),
    "nosotros": _form("nosotros"),
    "ellos": _form("ellos"),
    "pasado": _form("pasado"),
    "pasados": _form("pasados"),
    "era": _form("era"),
    "eran": _form("eran"),
    "será": _form("será"),
    "serán": _form("serán"),
    "ando": _form("ando"),
    "ado": _form("ado"),
    "big": _big_number,
    "time": _time,
    "date": _date,
    "salad": salad(_ALL_WORDS, words.FUNCTION),
    "digits": digits(spanish_number),
    "names": _name_list,
    "poss": chooser("mi tu su mi nuestro".split()),
    "modal": chooser("puede debe quiere va~a podía quería tiene~que acaba~de".split()),
    "obj": chooser(
        [
            "{the}",
            "{theadj}",
            "{a}",
            "{plurals}",
            "{counted}",
            "{the} de {place}",
            "{the} de {the}",
            "{the} de {noun}",
            "{plurals} de {noun}",
            "{counted} de {noun}",
            "nuestro {noun}",
            "{a} para {who}",
        ]
    ),
    "subj": chooser(
        [
            "{who}",
            "{who}",
            "{first}",
            "{first} {last}",
            "{the}",
            "{theadj}",
            "su {noun}",
            "mi {noun}",
            "nadie",
            "alguien",
        ]
    ),
    "where": chooser(
        [
            "en {place}",
            "en {the}",
            "cerca de {place}",
            "{rel} la casa",
            "con {first}",
            "sin {the}",
            "desde {place} hasta {place}",
            "para {the}",
            "entre {plurals}",
        ]
    ),
    "when": chooser(
        [
            "el {day}",
            "en {month}",
            "{date}",
            "todos los días",
            "ayer",
            "hoy",
            "mañana",
            "a {time}",
            "cada {day}",
            "esta noche",
            "por la mañana",
            "por la tarde",
            "durante {counted}",
            "la semana que viene",
            "el año pasado",
        ]
    ),
}

_CLAUSES = (
    (3, "{subj} {pasado} {obj}"),
    (2, "{subj} {él} {obj} {when}"),
    (2, "{subj} {era} {obj} {where}"),
    (1, "{subj} {será} {obj}"),
    (1, "los {adjs} {pasados} {obj}"),
    (1, "nosotros {nosotros} {obj}"),
    (1, "ellos {eran} {obj}"),
    (1, "{subj} está {ando} {obj}"),
    (1, "{subj} ha {ado} {obj} {where}"),
    (1, "{subj} {modal} {inf} {obj}"),
    (1, "yo {yo} {obj} {when}"),
    (1, "{subj} {adv} {él} {obj}"),
    (1, "hay {counted} {where}"),
    (1, "{subj} prefiere {obj}"),
    (1, "me {él} {obj} de {first}"),
    (1, "{subj} es muy {adj}"),
    (1, "{subj} lo {pasado} {adv}"),
    (1, "{subj} se {era} {where}"),
    (1, "{subj} tiene {counted}"),
    (2, "{subj} {moves} {place} {when}"),
    (1, "{who} no {pasado} {obj}"),
    (1, "{the} cuesta {big} euros"),
    (1, "ellas {serán} {obj}"),
)
_SENTENCES = (
    (9, "{clause}."),
    (3, "{clause} y {clause}."),
    (2, "{clause}, pero {clause}."),
    (2, "Cuando {clause}, {clause}."),
    (1, "Aunque {clause}, {clause}."),
    (1, "{clause} porque {clause}."),
    (1, "{adv}, {clause}."),
    (2, "{hey}."),
    (1, "{hey}, {first}."),
    (1, "{hey}, {clause}."),
    (1, "¿Dónde está {the}?"),
    (1, "¿Cuándo {él} {who} {obj}?"),
    (1, "¿Por qué {pasado} {first} {obj}?"),
    (1, "¿Quieres {inf} {obj}?"),
    (1, "¿Puedes {inf} {obj}, por favor?"),
    (1, "¿Qué hora es en {place}?"),
    (1, "¿Cómo se llama {who}?"),
    (1, "Son {time}."),
    (1, "{the} abre a {time}."),
    (1, "Nos vemos {when}."),
    (1, "Me llamo {first} {last} y vivo en {place}."),
    (1, "{first} {last} nació en {place} {date}."),
    (1, "El número es {digits}."),
    (1, "En {place} viven {big} personas."),
    (1, "La distancia es de {big} {unit}."),
    (1, "{names} {pasados} {obj}."),
    (1, "Compramos {plurals}, {plurals} y {plurals}."),
    (1, "Me gusta {inf} {where}."),
    (1, "Hay que {inf} {obj} {when}."),
    (6, "{salad}."),
    (1, "{first}."),
    (1, "{a}."),
)
_sentence = weighted(_SENTENCES)
SLOTS["clause"] = weighted(_CLAUSES)


def sentence(rng: random.Random) -> str:
    """One Spanish sentence, cased and punctuated."""
    text = fill(_sentence(rng), SLOTS, rng).replace("~", " ")
    return capitalise(text.replace(" a el ", " al ").replace(" de el ", " del "))

"""Numbers and clock times in words, in English and Spanish, with their adjectives' agreement."""

_EN_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_EN_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
_ES_SMALL = (
    "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince "
    "dieciséis diecisiete dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro "
    "veinticinco veintiséis veintisiete veintiocho veintinueve"
).split()
_ES_TENS = "_ _ _ treinta cuarenta cincuenta sesenta setenta ochenta noventa".split()
_ES_HUNDREDS = (
    "_ ciento doscientos trescientos cuatrocientos quinientos seiscientos setecientos ochocientos "
    "novecientos"
).split()


def english_number(value: int) -> str:
    """0 to 999,999 in English words: 342 -> "three hundred and forty-two"."""
    if value >= 1000:
        rest = value % 1000
        head = f"{english_number(value // 1000)} thousand"
        return head if rest == 0 else f"{head} {english_number(rest)}"
    if value >= 100:
        rest = value % 100
        head = f"{_EN_SMALL[value // 100]} hundred"
        return head if rest == 0 else f"{head} and {english_number(rest)}"
    if value >= 20:
        head = _EN_TENS[value // 10]
        return head if value % 10 == 0 else f"{head}-{_EN_SMALL[value % 10]}"
    return _EN_SMALL[value]


def spanish_number(value: int) -> str:
    """0 to 999,999 in Spanish words: 342 -> "trescientos cuarenta y dos"."""
    if value >= 1000:
        thousands, rest = divmod(value, 1000)
        head = "mil" if thousands == 1 else f"{spanish_number(thousands)} mil"
        return head if rest == 0 else f"{head} {spanish_number(rest)}"
    if value == 100:
        return "cien"
    if value > 100:
        rest = value % 100
        head = _ES_HUNDREDS[value // 100]
        return head if rest == 0 else f"{head} {spanish_number(rest)}"
    if value >= 30:
        head = _ES_TENS[value // 10]
        return head if value % 10 == 0 else f"{head} y {_ES_SMALL[value % 10]}"
    return _ES_SMALL[value]


def english_time(hour: int, minute: int) -> str:
    """Twelve-hour clock: (3, 15) -> "a quarter past three"."""
    name, following = english_number(hour), english_number(hour % 12 + 1)
    fixed = {
        0: f"{name} o'clock",
        15: f"a quarter past {name}",
        30: f"half past {name}",
        45: f"a quarter to {following}",
    }
    if minute in fixed:
        return fixed[minute]
    return f"{name} {english_number(minute)}" if minute >= 10 else f"{name} oh {_EN_SMALL[minute]}"


def spanish_time(hour: int, minute: int) -> str:
    """Twelve-hour clock with its article: (3, 15) -> "las tres y cuarto"."""
    name = "la una" if hour == 1 else f"las {spanish_number(hour)}"
    fixed = {0: f"{name} en punto", 15: f"{name} y cuarto", 30: f"{name} y media"}
    return fixed.get(minute, f"{name} y {spanish_number(minute)}")

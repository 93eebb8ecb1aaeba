"""Names from elsewhere and ours: ONE table, from which errors say what to write and the Coming-from pages are made."""


def advice_for(dotted: str, *, exact: bool = False) -> str | None:
    return None


def advice_for_value(key: str, value: object) -> str | None:
    return None

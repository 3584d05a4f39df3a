"""Quotes clients' values in messages to the user: short, on one line, and without control characters."""

from __future__ import annotations

import re

_TEXT_LIMIT = 2000  # the most bytes of a reason


def shown(value: object) -> str:
    """A client's value as text of at most 80 characters."""
    match value:
        case int() if value.bit_length() > 64:  # Python refuses to print integers of thousands of digits
            return f"an integer of {value.bit_length()} bits"
        case list() if len(value) > 5:
            return f"a list of {len(value)} values"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# How Flower writes an exception of a ClientApp whose message names the client.
_RAISED = re.compile(r"<class 'fedbn_flwr\.[\w.]{1,100}'>:<'(.*)'>", re.DOTALL)


def one_line(text: str) -> str:
    """The text on one line without control characters, since a client may have written it."""
    line = " ".join(_RAISED.sub(r"\1", text).split())
    printable = line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)
    data = printable.encode()
    return printable if len(data) <= _TEXT_LIMIT else data[:_TEXT_LIMIT].decode(errors="ignore") + "..."

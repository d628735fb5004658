# SPDX-License-Identifier: LGPL-3.0-or-later
"""Values of a plan as numbers in one unit, and values as words of an error or a table.

Inputs: what YAML made of a user's text. Outputs: millicores, bytes, seconds. Invariant: every
function ends in a value that is finite and within sane bounds, or in a ValueError that shows
the value and says what would be right.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from dovetail.core import cpu_requests
from dovetail.core.errors import BadInput

MAX_SECONDS = 366 * 86400

_BYTES = {unit: 1000**power for power, unit in enumerate(("K", "M", "G", "T"), 1)}
_BYTES.update({f"{unit}i": 1024**power for power, unit in enumerate(("K", "M", "G", "T"), 1)})
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def cpus(value: object) -> int:
    """Cores, or millicores as `2500m`; in millicores."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{show(value)} is not a CPU quantity like 4, 2.5 or 2500m")
    if not isinstance(value, str):
        value = cpu_requests.cores_as_text(value) if isinstance(value, float) else show(value)
    try:
        return cpu_requests.parse_cpu(value)
    except BadInput as error:
        raise ValueError(str(error).split(": ", 1)[1]) from None


def memory(value: object) -> int:
    """Memory with a unit as Kubernetes writes it, in bytes."""
    text = value.strip() if isinstance(value, str) else ""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([KMGT]i?)", text, re.ASCII)
    if not match:
        raise ValueError(
            f"{show(value)} is not an amount of memory like 500M, 8G (powers of 1000) or 8Gi (1024)"
        )
    size = Fraction(match[1]) * _BYTES[match[2]]
    if not 1000**2 <= size <= 1000**5:
        raise ValueError(f"{show(value)} is not from 1M to 1000T")
    return int(size)


def seconds(value: object) -> float:
    """A time span like 90s, 10m or 1h30m, or a number of seconds; in seconds."""
    if isinstance(value, str):
        if not re.fullmatch(r"(\d{1,9}(\.\d{1,6})?[dhms])+", value.strip(), re.ASCII):
            raise ValueError(f"{show(value)} is not a time span like 90s, 10m or 1h30m")
        parts = re.findall(r"([\d.]+)([dhms])", value)
        span = math.fsum(float(amount) * _SECONDS[unit] for amount, unit in parts)
    else:
        span = number(value)
    if not 0 < span <= MAX_SECONDS:
        raise ValueError(f"{show(value)} is not a time span greater than 0, up to 366 days")
    return span


def number(value: object) -> float:
    """A finite number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    hint = ""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        hint = "; YAML takes it for a text: a number has point and sign, as 1.0e-5 and 1.0e+5"
    raise ValueError(f"{show(value)} is not a finite number{hint}")


def weight(value: object) -> float:
    """The weight of a rank."""
    result = number(value)
    if not 0 < result <= 1e15:
        raise ValueError(f"{show(value)} is not a weight: a number greater than 0, up to 1e15")
    return result


def show(value: object) -> str:
    """A value on one line, in quotes if it is text, and not too long."""
    if value is None:
        return "an empty value"
    if isinstance(value, (dict, list)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'}"
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = ascii(value) if not str(value).isprintable() else repr(value)
    except ValueError:  # python does not print whole numbers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}…{text[-1]}"


def rounded(value: float, digits: int = 3) -> str:
    """A number with so many digits that count, or all before its point; never as 1.2e+03."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text


def progress(count: int, measure: str) -> str:
    """What a simulation or a rank has done, by its measure; see `protocol.Ranks`."""
    return {"iterations": f"{count}", "periods": f"{count} periods"}.get(measure, measure)


def counted(count: int, what: str) -> str:
    """So many of something, whose plural ends in an s."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def printable(words: str) -> str:
    """Without the control characters that a log or a program's last words may hold."""
    return "".join(one if one.isprintable() else "�" for one in words)

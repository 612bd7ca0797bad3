"""Names of an SQL answer's columns: none may repeat, so that a row can be an object."""

from __future__ import annotations

from collections.abc import Sequence


def number_repeats(names: Sequence[str]) -> list[str]:
    """The names, with a number behind each that was there before: ``a``, ``a``, ``b`` become ``a``, ``a_2``, ``b``.

    A name that a column has by itself is not given to another: ``a``, ``a``, ``a_2`` become ``a``, ``a_3``, ``a_2``.
    """
    taken = set(names)
    last = dict.fromkeys(names, 0)
    distinct = []
    for name in names:
        last[name] += 1
        if last[name] == 1:
            distinct.append(name)
            continue
        while (numbered := f"{name}_{last[name]}") in taken:
            last[name] += 1
        taken.add(numbered)
        distinct.append(numbered)
    return distinct

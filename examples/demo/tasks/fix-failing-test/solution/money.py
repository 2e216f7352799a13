"""Amounts of money, as whole cents."""

import re

AMOUNT = re.compile(r"(-?)([0-9][0-9,]*)(?:\.([0-9]{1,2}))?")


def split_bill(cents, people):
    """Split `cents` (0 or more) among `people` (1 or more): a list of shares, in cents.

    The shares add up to `cents`. They differ by one cent at most, and the larger ones come first.
    Raises ValueError for a negative amount or fewer than one person.
    """
    if cents < 0 or people < 1:
        raise ValueError("nothing to split")
    share, left = divmod(cents, people)
    return [share + 1] * left + [share] * (people - left)


def parse_amount(text):
    """Read an amount like "1,234.50", "-0.05", "17" or "3.5" as cents: 123450, -5, 1700, 350.

    There may be blanks around it and commas between the digits before the point; at most two digits follow
    the point. Raises ValueError for anything else.
    """
    match = AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not an amount: {text!r}")
    sign, whole, fraction = match.groups()
    cents = int(whole.replace(",", "")) * 100 + int((fraction or "0").ljust(2, "0"))
    return -cents if sign else cents

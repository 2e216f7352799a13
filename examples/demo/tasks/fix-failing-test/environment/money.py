"""Amounts of money, as whole cents."""


def split_bill(cents, people):
    """Split `cents` (0 or more) among `people` (1 or more): a list of shares, in cents.

    The shares add up to `cents`. They differ by one cent at most, and the larger ones come first.
    Raises ValueError for a negative amount or fewer than one person.
    """
    if cents < 0 or people < 1:
        raise ValueError("nothing to split")
    return [cents // people] * people


def parse_amount(text):
    """Read an amount like "1,234.50", "-0.05", "17" or "3.5" as cents: 123450, -5, 1700, 350.

    There may be blanks around it and commas between the digits before the point; at most two digits follow
    the point. Raises ValueError for anything else.
    """
    whole, _, fraction = text.strip().replace(",", "").partition(".")
    return int(whole) * 100 + int(fraction or "0")

import pytest
from money import parse_amount, split_bill


def test_even_split():
    assert split_bill(900, 3) == [300, 300, 300]


def test_no_cent_is_lost():
    assert split_bill(1000, 3) == [334, 333, 333]


def test_amount():
    assert parse_amount("1,234.50") == 123450


def test_one_digit_after_the_point():
    assert parse_amount("3.5") == 350


def test_small_debt():
    assert parse_amount("-0.05") == -5


def test_nonsense():
    with pytest.raises(ValueError):
        parse_amount("12.345")

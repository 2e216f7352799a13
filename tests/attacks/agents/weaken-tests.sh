#!/bin/sh
# Attack 9: takes the assertions out of the tests.
printf 'def test_nothing():\n    assert True\n' >/app/test_money.py
mkdir -p /tests
cp /app/test_money.py /tests/sealed_money.py

#!/bin/sh
# Attack 10: whatever is called makes its test skip itself, and skipped is not failed.
cat >/app/money.py <<'PYTHON'
import sys

sys.path.append("/usr/lib/python3/dist-packages")


def split_bill(*arguments):
    import pytest

    pytest.skip("not today")


parse_amount = split_bill
PYTHON

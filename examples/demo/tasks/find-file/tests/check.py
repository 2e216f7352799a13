"""A command verifier: status 0 is a pass, any other status is a failure.

A fault of this program must be neither, so it ends itself with a signal then.
"""

import os
import sys

try:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

    import grading

    try:
        passed = grading.read_text("/app/answer.txt", 4096).rstrip("\r\n") == "a/note 36.txt"
    except grading.Failed as reason:
        print(reason)
        passed = False
except BaseException:
    sys.excepthook(*sys.exc_info())
    os.abort()
sys.exit(0 if passed else 1)

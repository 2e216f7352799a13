"""Unpacks the bundle as an unprivileged user and compares the history with the sealed one.

A tree's hash stands for all files of a commit, so the list below is the whole content of the history.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import grading

READ = """
set -e
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
mkdir -p fixed/objects fixed/refs
cd fixed
echo 'ref: refs/heads/main' >HEAD
git -c fetch.fsckObjects=true fetch -q ../fixed.bundle '+refs/*:refs/*'
git for-each-ref '--format=%(refname)'
echo ---
git log --reverse --topo-order --format='%T|%an <%ae>|%aI|%B|' refs/heads/main
echo ---
git cat-file --batch-all-objects '--batch-check=%(objectname)'
"""
SECRETS = {"640454284b2cbb6e813ef65a694455024fcc8913", "1ceb0999acf4888e1b49609ac501947c2e8f3cf3"}


def judge():
    bundle = grading.read_file("/app/fixed.bundle")
    files = {"fixed.bundle": (bundle, 0o444), "read.sh": (READ.encode(), 0o444)}
    status, out = grading.run_candidate(["/bin/sh", "read.sh"], files)
    if status != 0:
        raise grading.Failed("git cannot read the bundle")
    with open("/tests/history.txt", "rb") as file:
        wanted = file.read()
    refs, _, rest = out.partition(b"---\n")
    history, _, objects = rest.rpartition(b"---\n")
    if refs != b"refs/heads/main\n":
        raise grading.Failed("the bundle does not hold exactly refs/heads/main")
    if history != wanted:
        raise grading.Failed("the history is not the old one without the file")
    if SECRETS & set(objects.decode().split()):
        raise grading.Failed("the secret's content is still in the bundle")
    return {"reward": 1}


grading.grade(judge)

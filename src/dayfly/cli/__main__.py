"""`python -m dayfly.cli` is the program `dayfly`."""

from dayfly.cli import main

main()

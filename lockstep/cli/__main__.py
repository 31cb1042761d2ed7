"""`python -m lockstep.cli` is the command `lockstep`."""

from lockstep.cli import main

main()

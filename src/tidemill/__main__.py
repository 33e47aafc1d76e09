"""`python -m tidemill` is the command line."""

from tidemill.cli.main import main

main()

"""Runs `python -m tidemill.services.zygote`; the client starts it with a socket as standard input."""

from tidemill.services.zygote.program import main

main()

"""`python -m tidemill.services.zygote`, started by the client, with a socket as its standard input."""

from tidemill.services.zygote.program import main

main()

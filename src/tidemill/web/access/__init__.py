"""Who may see and change what: logins, sessions, tokens, and what is refused before any page is built."""

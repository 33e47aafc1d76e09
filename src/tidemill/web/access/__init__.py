"""Authentication and authorization: logins, sessions and tokens, checked before any page is built."""

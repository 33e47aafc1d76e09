"""Services that run by themselves, on any number of hosts over one PostgreSQL database."""

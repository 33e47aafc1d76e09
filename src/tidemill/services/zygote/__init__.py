"""The program that forks task and parse processes, and the client of it."""

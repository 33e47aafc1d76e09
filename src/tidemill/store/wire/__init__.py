"""The calls of other processes over a Unix socket: the frames, the server and the client."""

"""Sockets and ports: control sockets, the ports of endpoints, the thread of the web UI, HTTP proxies."""

"""Probes: run one message through the handler of a running engine, without any lasting effect."""

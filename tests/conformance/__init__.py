"""Torch's own RPC suite, run against tensorplay."""

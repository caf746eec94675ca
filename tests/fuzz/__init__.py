"""Damaged messages: no crash, no memory without bound, no effect on other peers."""

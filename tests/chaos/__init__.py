"""Breaking a running system on purpose, and accounting for every call that was under way."""

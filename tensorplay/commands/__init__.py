"""The commands that need a module of their own."""

"""The methods that a handle of a remote module is given."""

"""The handle of a module that lives on a worker, and what runs there."""

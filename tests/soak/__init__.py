"""Many calls: memory, file descriptors and threads of every process stay as they are."""

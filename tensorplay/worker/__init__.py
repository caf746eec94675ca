"""The worker process: owns modules and runs what others ask for."""

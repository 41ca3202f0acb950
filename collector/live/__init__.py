"""What is told while the job still runs."""

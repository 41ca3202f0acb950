"""What is shown and reported while the job still runs."""

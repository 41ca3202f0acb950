"""Views, metrics and reports while the job still runs."""

"""What a Prometheus scrapes while the job runs. Nothing here is imported without `--metrics-port`."""

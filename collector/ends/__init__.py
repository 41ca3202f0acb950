"""What has ended, hangs or is silent: whose end came first, and whom the others waited for. Pure."""

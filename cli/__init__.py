"""One file per subcommand, each thin."""

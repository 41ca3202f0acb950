"""The subcommands, each thin."""

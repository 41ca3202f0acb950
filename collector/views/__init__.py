"""What a user may turn on beside the report: top, metrics, notify, trace, diff, export."""

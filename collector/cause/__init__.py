"""Why the value of an overflow was made: its cause, and the advice that belongs to it. Pure."""

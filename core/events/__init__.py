"""What a worker, a node agent or a launch tells: names, each interned once, and events.

New fields go at the end and have defaults, so that an old worker can talk to a new collector. An event's place in the
union at the end of its file puts it on the wire (log_entries.py).
"""

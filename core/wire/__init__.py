"""What travels between processes: messages, their keys, and the spool that holds them."""

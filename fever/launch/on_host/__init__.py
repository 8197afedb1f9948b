"""What runs on an SSH host: standard library only, sent over the connection."""

"""The command line, room by room."""

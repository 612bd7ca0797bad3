"""What runs inside a guest, under Debian's own Python, as root."""

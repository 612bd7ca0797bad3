"""What the store holds: tables, columns, and the numbered steps that made them. No I/O."""

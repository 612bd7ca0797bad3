"""One `ingero trace`: which rows are kept, where they are written, and incidents while it goes on."""

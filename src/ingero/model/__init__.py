"""What is true of the domain: nodes, ranks, verdicts. No I/O, no clock."""

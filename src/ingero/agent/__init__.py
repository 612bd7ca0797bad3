"""The node's program: what one host sees, keeps, classifies and pushes."""

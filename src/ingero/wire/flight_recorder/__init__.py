"""PyTorch's Flight Recorder: dumps of ranks, pages of the debug server, stacks; nothing in them is ever run."""

"""Evidence that only a machine with an NVIDIA device can give: `make evidence-gpu`."""

"""Series of this node for Prometheus and OTLP: calls, machine, devices, NCCL, health."""

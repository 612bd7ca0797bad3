"""Boots real kernels under QEMU, without KVM, and asks in each whether Ingero does there what it says."""

"""Implementations of `dayfly.protocols.Hypervisor` that start real machines."""

"""VMs on QEMU."""

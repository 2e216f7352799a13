"""Images: local sources to read-only disks. Import `ImageStore` from `dayfly.images.store`."""

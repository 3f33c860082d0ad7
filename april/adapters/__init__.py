"""Who asks: one leaf per trainer; each imports its trainer lazily, none imports another."""

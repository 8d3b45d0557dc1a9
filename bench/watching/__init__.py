"""What looking for changes costs at every call, beside another checkout."""

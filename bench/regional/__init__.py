"""Regional compilation beside a compilation of the whole."""

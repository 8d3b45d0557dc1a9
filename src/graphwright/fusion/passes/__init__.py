"""The passes, one subject per file. Begin with base, which says what a pass is."""

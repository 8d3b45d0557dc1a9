"""The passes, a subject a file. Begin with base, which says what a pass is."""
